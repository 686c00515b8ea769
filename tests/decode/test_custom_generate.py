"""`model.generate(..., custom_generate=speculative)`: what callers of transformers bring is honoured or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria

from decode import generate, speculative
from decode.common.errors import ConfigError
from decode.drafters.lm import LMDraft
from tests.decode.checks import VOCAB, check_pathwise_equality, ragged_prompts
from tests.decode.drafters import Oracle
from tests.decode.test_generate import Keeper
from tests.tiny import stop_within, tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("uncaptured")

END = 5


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(VOCAB, dtype=torch.float64)


def both(model: Any, ids: torch.Tensor, **settings: Any) -> tuple[Any, Any]:
    """What transformers' own loop gives, and ours."""
    asked = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0, **settings}
    draft = LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))
    return model.generate(ids, **asked), model.generate(ids, custom_generate=speculative, drafter=draft, **asked)


COUNTING: dict[str, dict[str, Any]] = {
    "min_new_tokens": {"min_new_tokens": 6},
    "min_length": {"min_length": 14},
    "forced_eos": {"forced_eos_token_id": 7},
    "decay": {"exponential_decay_length_penalty": (2, 1.5)},
    "begin": {"begin_suppress_tokens": list(range(30))},
}


@pytest.mark.parametrize("name", COUNTING)
def test_processors_that_count_columns_are_taken_where_no_row_is_padded(model: Any, name: str) -> None:
    """Of a padded row they would count the padding: with min_new_tokens=6 a row padded by one got seven."""
    ids, mask = ragged_prompts(2)
    settings = {"eos_token_id": END, "sequence_bias": [[[END], 6.0]], **COUNTING[name]}
    theirs, ours = both(model, ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(ours, theirs)
    with pytest.raises(ConfigError, match=r"count columns of the batch.* 9 columns for 8 tokens"):
        both(model, ids, attention_mask=mask, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True asks for tensors"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha asks for another way to decode"),
        ({"dola_layers": "low"}, "dola_layers asks for another way to decode"),
        ({"output_hidden_states": True, "output_logits": True}, "output_logits and output_hidden_states=True"),
        ({"stopping_criteria": [ConfidenceCriteria(0.5)]}, "ConfidenceCriteria looks at scores"),
        ({"stop_strings": ["a"], "tokenizer": object()}, "transformers keeps tokenizer= back"),
        ({"position_ids": torch.arange(3, 12)[None]}, "position_ids differ"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
        ({"do_sample": True, "logits_processor": [TemperatureLogitsWarper(0.01)]}, "TemperatureLogitsWarper"),
        ({"encoder_repetition_penalty": 1.5}, "EncoderRepetitionPenalty"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_what_is_not_honoured_is_refused(model: Any, settings: dict[str, Any], words: str) -> None:
    ids, _ = ragged_prompts(1)
    with pytest.raises(ConfigError, match=words):
        model.generate(ids, custom_generate=speculative, max_new_tokens=4, **settings)


def test_inputs_of_the_model_that_would_be_left_out_are_refused(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    with pytest.raises(ConfigError, match=r"inputs \['token_type_ids'\]"):
        speculative(model, ids, [], [], model.generation_config, token_type_ids=torch.zeros_like(ids))  # type: ignore[arg-type]


def test_positions_that_are_the_usual_ones_are_taken(model: Any) -> None:
    ids, mask = ragged_prompts(2)
    usual = (mask.cumsum(-1) - 1).clamp(min=0)
    theirs, ours = both(model, ids, attention_mask=mask, position_ids=usual)
    assert torch.equal(ours, theirs)


class Arrived(Exception):
    """What a custom method was given."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given


def probe(
    model: Any,
    input_ids: torch.Tensor,
    tokenizer: Any = None,
    streamer: Any = None,
    assistant_model: Any = None,
    stop_strings: Any = None,
    seed: Any = None,
    **others: Any,
) -> None:
    """With the parameters of `speculative` that transformers' own methods have too."""
    raise Arrived(locals())


def test_what_transformers_hands_to_a_custom_method(model: Any) -> None:
    """The page and `speculative` say which arguments arrive: where this fails, transformers has changed, and more can
    be honoured, or less."""
    ids, streamer = ragged_prompts(1)[0], Keeper()
    tokenizer = tiny_tokenizer()
    asked: Any = {"tokenizer": tokenizer, "streamer": streamer, "stop_strings": ["a"], "seed": 3, "max_time": 5.0}
    asked |= {"return_dict_in_generate": True, "output_scores": True, "stopping_criteria": [MaxLengthCriteria(12)]}
    with pytest.raises(Arrived) as arrived:
        model.generate(ids, custom_generate=probe, max_new_tokens=8, **asked)
    given = arrived.value.given
    assert given["tokenizer"] is None
    assert given["streamer"] is None
    assert streamer.seen == ids[0].tolist(), "it is told the prompt, and never more"
    assert (given["stop_strings"], given["seed"]) == (["a"], 3)
    config, criteria = given["others"]["generation_config"], given["others"]["stopping_criteria"]
    assert (config.return_dict_in_generate, config.output_scores, config.stop_strings) == (True, True, None)
    assert [type(one) for one in criteria] == [MaxLengthCriteria, MaxTimeCriteria]
    assert criteria[0].max_length == 12
    with pytest.raises(ValueError, match="tokenizer"):  # as settings of the model, without our parameter's help
        model.generate(ids, custom_generate=speculative, tokenizer=tokenizer, generation_config=stopping_at("a"))


def stopping_at(text: str) -> GenerationConfig:
    return GenerationConfig(stop_strings=[text], max_new_tokens=8)


def test_a_bound_streamer_and_tokenizer_arrive() -> None:
    model, tokenizer, ids = tiny_llama(300, dtype=torch.float64), tiny_tokenizer(300), torch.tensor([[5, 6, 7]])
    asked: Any = {"do_sample": False, "max_new_tokens": 20}
    free = model.generate(ids, **asked)  # type: ignore[operator]
    asked["stop_strings"] = [stop_within(tokenizer, free[0, 3:].tolist())]
    want, streamer = model.generate(ids, tokenizer=tokenizer, **asked), Keeper()  # type: ignore[operator]
    assert want.shape[1] < free.shape[1]
    draft = LMDraft(tiny_llama(300, num_layers=1, seed=3, dtype=torch.float64))
    bound = partial(speculative, drafter=draft, tokenizer=tokenizer, streamer=streamer)
    assert torch.equal(model.generate(ids, custom_generate=bound, **asked), want)  # type: ignore[operator]
    assert streamer.seen == [*want[0].tolist(), -1]


def test_the_answer_has_a_name_where_that_is_asked_for(model: Any) -> None:
    ids, mask = ragged_prompts(2)
    theirs, ours = both(model, ids, attention_mask=mask, return_dict_in_generate=True)
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.scores is None


def ends_at_six(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    return input_ids[:, -1] % 6 == 0


OWN_ENDS: dict[str, Any] = {
    "length": lambda: MaxLengthCriteria(12),
    "end token": lambda: EosTokenCriteria(END),
    "own": lambda: ends_at_six,
}


@pytest.mark.parametrize("name", OWN_ENDS)
def test_criteria_of_the_caller_are_honoured(model: Any, name: str) -> None:
    """A length or end token of the caller's own replaced the settings in transformers, and was lost here."""
    ids, _ = ragged_prompts(1)
    settings = {"sequence_bias": [[[END], 3.0]], "stopping_criteria": [OWN_ENDS[name]()], "max_new_tokens": 24}
    theirs, ours = both(model, ids, **settings)
    assert theirs.shape[1] < 33
    assert torch.equal(ours, theirs)


def test_allowed_tokens_of_a_batch_are_honoured(model: Any) -> None:
    ids, mask = ragged_prompts(2)
    settings = {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row, VOCAB, 3))}
    theirs, ours = both(model, ids, attention_mask=mask, **settings)
    assert torch.equal(ours, theirs)


def test_a_seed_is_the_one_of_generate(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    call: Any = {"do_sample": True, "top_k": 0, "max_new_tokens": 10, "pad_token_id": 0}
    ours = model.generate(ids, custom_generate=speculative, seed=3, **call)
    assert torch.equal(ours, generate(model, None, ids, max_new_tokens=10, seed=3).sequences)


def test_several_sequences_of_a_prompt_have_noise_of_their_own(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    _, ours = both(model, ids, do_sample=True, top_k=0, num_return_sequences=3)
    assert len({tuple(row) for row in ours.tolist()}) == 3


KINDS = ["oracle", "tree"]


class Threes(StoppingCriteria):
    """Ends a text whose last token and length agree modulo 3, from the 12th token on; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # type: ignore[override]
        assert scores is None
        self.asked += input_ids.tolist()
        done = (input_ids[:, -1] - input_ids.shape[1]) % 3 == 0
        return done & (input_ids.shape[1] >= 12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_criterion_ends_a_row_inside_a_round_where_plain_decoding_ends_it(model: Any, kind: str) -> None:
    out = check_pathwise_equality(model, kind, 3, max_new_tokens=24, stopping_criteria=Threes())
    assert set(out.stats.finish_reasons) == {"stop"}
    assert any(one.drafted < 5 for one in out.stats.rounds), "no round was cut"
    for length, prompt in zip(out.lengths.tolist(), (9, 8, 7), strict=True):
        row = 9 - prompt
        assert (int(out.sequences[row, 9 + length - prompt - 1]) - length) % 3 == 0


def test_a_criterion_is_asked_about_every_token_once_and_in_order(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    call = partial(generate, model, input_ids=ids, max_new_tokens=24, eos_token_id=(), seed=0)
    plain, drafted = Threes(), Threes()
    text = call(None, stopping_criteria=plain)
    call(Oracle([call(None).sequences[0].tolist()], VOCAB), stopping_criteria=[drafted])
    assert drafted.asked == plain.asked == [text.sequences[0, :end].tolist() for end in range(10, text.lengths[0] + 1)]


def test_a_criterion_ends_texts_where_transformers_does(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    theirs = model.generate(ids, do_sample=False, max_new_tokens=24, stopping_criteria=[Threes()])
    assert theirs.shape[1] < 33
    ours = generate(model, None, ids, temperature=0, max_new_tokens=24, stopping_criteria=[Threes()])
    assert torch.equal(ours.sequences, theirs)


def test_stop_strings_of_transformers_are_a_criterion() -> None:
    tokenizer, model = tiny_tokenizer(300), tiny_llama(300, dtype=torch.float64)
    ids = torch.tensor([[5, 6, 7]])
    free = generate(model, None, ids, max_new_tokens=20, temperature=0, eos_token_id=())
    stop = stop_within(tokenizer, free.sequences[0, 3:].tolist())
    theirs = model.generate(ids, do_sample=False, max_new_tokens=20, stop_strings=[stop], tokenizer=tokenizer)  # type: ignore[operator]
    draft = LMDraft(tiny_llama(300, num_layers=1, seed=3, dtype=torch.float64))
    for drafter in (None, draft, Oracle(free.sequences.tolist(), 300)):
        criteria = [StopStringCriteria(tokenizer, [stop])]
        ours = generate(model, drafter, ids, max_new_tokens=20, temperature=0, stopping_criteria=criteria)
        assert torch.equal(ours.sequences, theirs)
        assert ours.stats.finish_reasons == ["stop"]


def test_a_criterion_of_time_ends_the_text(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    out = generate(model, None, ids, max_new_tokens=24, stopping_criteria=MaxTimeCriteria(0.0), eos_token_id=())
    assert out.lengths.tolist() == [10]


def only_even(sequence: int, ids: Tensor) -> list[int]:
    """Even tokens of the first sequence, odd ones of the others; which ones follows from the last token."""
    return list(range(sequence % 2, VOCAB, 2 + 2 * (int(ids[-1]) % 3 == 0)))


@pytest.mark.parametrize("kind", KINDS)
def test_allowed_tokens_are_those_of_the_nodes_own_sequence(model: Any, kind: str) -> None:
    settings: Any = {"max_new_tokens": 16, "prefix_allowed_tokens_fn": only_even}
    out = check_pathwise_equality(model, kind, 3, **settings)
    for row, sequence in enumerate(out.sequences):
        for at in range(9, 25):
            assert int(sequence[at]) in only_even(row, sequence[:at])


def test_allowed_tokens_are_those_of_transformers(model: Any) -> None:
    ids, mask = ragged_prompts(2)
    asked = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    theirs = model.generate(ids, attention_mask=mask, prefix_allowed_tokens_fn=only_even, **asked)
    draft = LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))
    call = partial(generate, model, input_ids=ids, attention_mask=mask, max_new_tokens=12, temperature=0)
    ways: list[dict[str, Any]] = [{"audit": True}, {"batch_size": 1}]
    for settings in ways:
        assert torch.equal(call(draft, prefix_allowed_tokens_fn=only_even, **settings).sequences, theirs)


def test_a_dead_end_counts_only_where_the_text_comes_to_it(model: Any) -> None:
    """Behind an end token the function is asked too, about drafted tokens and rows that have ended."""
    ids, mask = ragged_prompts(2)
    call = partial(generate, model, input_ids=ids, attention_mask=mask, max_new_tokens=16, seed=0)
    draft = LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))
    end, before = 7, 9 + 3

    def script(sequence: int, ids: Tensor, last: int = end) -> list[int]:
        if len(ids) > before or last in ids[9:].tolist():
            return []
        return [last] if len(ids) == before else [3, 5]

    plain = call(None, prefix_allowed_tokens_fn=script, eos_token_id=end)
    assert plain.lengths.tolist() == [13, 13]
    assert torch.equal(call(draft, prefix_allowed_tokens_fn=script, eos_token_id=end).sequences, plain.sequences)
    for drafter in (None, draft):
        with pytest.raises(ConfigError, match="allows no token after the 13 tokens of sequence 0"):
            call(drafter, prefix_allowed_tokens_fn=script, eos_token_id=())


def test_sequences_of_a_prompt_have_noise_of_their_own(model: Any) -> None:
    ids, mask = ragged_prompts(2)
    draft = LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))
    call = partial(generate, model, max_new_tokens=12, eos_token_id=(), seed=4)
    for drafter in (None, draft):
        out = call(drafter, input_ids=ids, attention_mask=mask, num_return_sequences=3, batch_size=4)
        assert torch.equal(out.sequences[:, :9], ids.repeat_interleave(3, 0))
        assert len({tuple(row) for row in out.sequences.tolist()}) == 6
        each = call(drafter, input_ids=ids.repeat_interleave(3, 0), attention_mask=mask.repeat_interleave(3, 0))
        assert torch.equal(out.sequences, each.sequences)
        assert out.lengths.tolist() == [21, 21, 21, 20, 20, 20]


def test_no_seed_is_one_of_torchs_generator(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    draft = LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))
    texts = []
    for drafter in (None, draft, None):
        torch.manual_seed(11)
        texts.append(generate(model, drafter, ids, max_new_tokens=16, eos_token_id=()).sequences)
    texts.append(generate(model, None, ids, max_new_tokens=16, eos_token_id=()).sequences)
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[2], texts[3])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scores": ({"stopping_criteria": ConfidenceCriteria(0.5)}, "ConfidenceCriteria looks at scores"),
    "no criterion": ({"stopping_criteria": [3]}, "stopping_criteria holds 3"),
    "no answer": (
        {"stopping_criteria": lambda ids, scores: None},
        "<lambda> was asked about one row and answered None",
    ),
    "two answers": (
        {"stopping_criteria": lambda ids, scores: torch.tensor([True, False])},
        r"answered \(\(2,\), torch.bool\)",
    ),
    "no function": ({"prefix_allowed_tokens_fn": [1, 2]}, "prefix_allowed_tokens_fn=.*cannot be called"),
    "copies": ({"num_return_sequences": 2, "temperature": 0}, "num_return_sequences=2 at temperature 0"),
    "none": ({"num_return_sequences": 0}, "num_return_sequences=0"),
    "rows": ({"num_return_sequences": 2, "rows": [0]}, r"rows=\[0\] must name each of 2 sequences"),
    "stream": ({"num_return_sequences": 2, "streamer": object()}, "a streamer follows one sequence"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused(model: Any, name: str) -> None:
    settings, words = REFUSED[name]
    call: dict[str, Any] = {"max_new_tokens": 2} | settings
    with pytest.raises(ConfigError, match=words):
        generate(model, None, ragged_prompts(1)[0], **call)
