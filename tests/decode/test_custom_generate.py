"""`model.generate(..., custom_generate=speculative)`: what transformers hands on is honoured or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    TemperatureLogitsWarper,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria

from decode import generate, speculative
from decode.common.errors import ConfigError
from decode.drafters.lm import LMDraft
from tests.decode.checks import VOCAB, ragged_prompts
from tests.streams import Keeper
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
