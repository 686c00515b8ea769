"""The public API: shapes, padding and masks of every make, ends of sequences, streamers, statistics, errors."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor
from transformers.generation.streamers import BaseStreamer

from decode import generate, load_drafter, speculative
from decode.acceptance import acceptance_by_position, expected_tau, overlap, predicted_speedup, tau, windows
from decode.common.errors import ConfigError, InputError, RunError
from decode.drafters.lm import LMDraft
from decode.sampling.warp import Sampling, log_probs, warp
from decode.stats import Round
from tests.decode.checks import VOCAB, both_ways, check_pathwise_equality, ragged_prompts
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_llama, tiny_tokenizer


class Keeper(BaseStreamer):
    """What was streamed; -1 is the end."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.seen.append(-1)


@pytest.fixture(scope="module")
def pair() -> tuple[torch.nn.Module, LMDraft]:
    return tiny_llama(VOCAB, dtype=torch.float64), LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))


@pytest.mark.parametrize("left", [True, False])
def test_padding_side_does_not_matter_and_prompts_are_unchanged(pair, left: bool) -> None:
    model, draft = pair
    ids, mask = ragged_prompts(3)
    if not left:
        ids, mask = ids.flip(1), mask.flip(1)
    out = generate(model, draft, ids, mask, max_new_tokens=10, eos_token_id=(), seed=0)
    assert out.sequences.shape == (3, ids.shape[1] + 10)
    assert torch.equal(out.sequences[:, : ids.shape[1]], ids)
    assert out.lengths.tolist() == [19, 18, 17]
    bare = generate(model, None, ids[1:2][:, mask[1].bool()], max_new_tokens=10, rows=[1], eos_token_id=(), seed=0)
    assert torch.equal(out.sequences[1, ids.shape[1] :], bare.sequences[0, 8:])


@pytest.mark.parametrize("kind", by_default(1, ["oracle", "random", "tree"]))
def test_rows_end_at_their_end_token_wherever_it_falls(pair, kind: str) -> None:
    model, draft = pair
    plain, _ = both_ways(model, draft, 4, max_new_tokens=30, seed=2)
    eos = plain.sequences[0, 20].item()
    out = check_pathwise_equality(
        model, draft if kind == "random" else kind, 4, max_new_tokens=30, seed=2, eos_token_id=[eos]
    )
    new = out.sequences[0, 9:].tolist()
    assert new.index(eos) <= 11
    assert out.lengths[0] == 9 + new.index(eos) + 1
    assert out.stats.finish_reasons[0] == "eos"
    assert out.stats.num_tokens == sum(out.lengths) - (9 + 8 + 7 + 6)


def test_a_stop_string_ends_the_row_with_the_token_that_completes_it() -> None:
    tokenizer = tiny_tokenizer(300)
    model = tiny_llama(300)
    draft = LMDraft(tiny_llama(300, num_layers=1, seed=3))
    ids = torch.tensor([[5, 6, 7]])
    free = generate(model, None, ids, max_new_tokens=30, eos_token_id=(), seed=0)
    stop = str(tokenizer.decode(free.sequences[0, 10:12]))
    for drafter in (None, draft, LMDraft(model)):
        out = generate(
            model, drafter, ids, max_new_tokens=30, stop_strings=[stop], tokenizer=tokenizer, eos_token_id=(), seed=0
        )
        text = str(tokenizer.decode(out.sequences[0, 3:]))
        assert stop in text
        assert stop not in str(tokenizer.decode(out.sequences[0, 3:-1]))
        assert out.stats.finish_reasons == ["stop"]
    assert model.generation_config is not None
    model.generation_config.stop_strings = [stop]  # None is the model's own, () none
    own = generate(model, None, ids, max_new_tokens=30, tokenizer=tokenizer, eos_token_id=(), seed=0)
    assert own.stats.finish_reasons == ["stop"]
    none = generate(model, None, ids, max_new_tokens=30, stop_strings=(), eos_token_id=(), seed=0)
    assert torch.equal(none.sequences, free.sequences)
    with pytest.raises(ConfigError, match="tokenizer"):
        generate(model, None, ids, stop_strings=[stop], seed=0)


def test_damaged_weights_are_bad_input(tmp_path) -> None:
    from decode.config import ModelConfig
    from decode.models.load import load_model

    file = save_tiny_target(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match="damaged"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_a_draft_may_know_a_shorter_context_than_its_target(pair, caplog) -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    draft = LMDraft(GPT2LMHeadModel(GPT2Config(**sizes)).double().eval())
    with caplog.at_level("WARNING", logger="decode"):
        for tree in (None, "2x1"):
            out = check_pathwise_equality(pair[0], draft, 3, max_new_tokens=20, tree=tree)
    assert "contexts of 16 tokens, and 29 may be reached" in caplog.text
    drafted = [one.drafted for one in out.stats.rounds]
    assert drafted[0] == 2
    assert drafted[-1] == 0
    ids, mask = torch.arange(24)[None].expand(2, -1), torch.ones(2, 24, dtype=torch.long)
    mask[1, :20] = 0  # one row is past the table of positions, and one is not
    for rows in (slice(0, 1), slice(0, 2)):
        given: dict[str, Any] = {"attention_mask": mask[rows], "max_new_tokens": 8, "eos_token_id": (), "seed": 0}
        plain = generate(pair[0], None, ids[rows], **given).sequences
        assert torch.equal(generate(pair[0], draft, ids[rows], **given).sequences, plain)


@pytest.mark.parametrize("broken", ["norm", "head"])
def test_a_target_whose_scores_are_nan_is_named(broken: str) -> None:
    """Every rule made token 0 of them, and a certificate found no mismatch."""
    model = tiny_llama()
    weights = model.model.norm if broken == "norm" else model.lm_head
    weights.weight.data[3] = float("nan")
    for verifier, temperature in itertools.product(("coupled", "rejection", "block"), (0.0, 1.0)):
        with pytest.raises(RunError, match=r"scores are NaN behind token 3 of sequence 0.*dtype=float32"):
            generate(model, None, torch.tensor([[1, 2, 4]]), temperature=temperature, verifier=verifier)


def test_one_token_prompts_and_one_new_token(pair) -> None:
    model, draft = pair
    for new in (1, 2, 7):
        ids = torch.tensor([[3], [4]])
        plain = generate(model, None, ids, max_new_tokens=new, eos_token_id=(), seed=0)
        assert torch.equal(
            plain.sequences, generate(model, draft, ids, max_new_tokens=new, eos_token_id=(), seed=0).sequences
        )


def test_history_processors_see_each_nodes_own_prefix(pair) -> None:
    model, _ = pair
    penalty = [RepetitionPenaltyLogitsProcessor(1.7)]
    for kind in ("oracle", "tree"):
        out = check_pathwise_equality(model, kind, 2, max_new_tokens=20, temperature=0.0, logits_processor=penalty)
        assert out.stats.tau > 1.5
    ids, _ = ragged_prompts(1)
    ours = generate(
        model, None, ids, max_new_tokens=12, temperature=0, logits_processor=penalty, eos_token_id=(), seed=0
    )
    theirs = model.generate(ids, do_sample=False, max_new_tokens=12, repetition_penalty=1.7)
    assert torch.equal(ours.sequences, theirs)


def test_custom_generate_takes_the_settings_of_generate(pair) -> None:
    model, draft = pair
    ids, mask = ragged_prompts(2)
    settings = {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0}
    greedy = model.generate(ids, do_sample=False, **settings)
    assert torch.equal(
        greedy, model.generate(ids, do_sample=False, custom_generate=speculative, drafter=draft, **settings)
    )
    sampled = []
    for drafter in (None, draft):
        torch.manual_seed(7)
        sampled.append(
            model.generate(ids, do_sample=True, top_k=5, custom_generate=speculative, drafter=drafter, **settings)
        )
    assert torch.equal(*sampled)
    with pytest.raises(ConfigError, match="num_beams"):
        model.generate(ids, num_beams=2, custom_generate=speculative, drafter=draft, **settings)


def test_streamed_tokens_are_the_output(pair) -> None:
    model, draft = pair
    ids, _ = ragged_prompts(1)
    streamer = Keeper()
    out = generate(model, draft, ids, max_new_tokens=15, streamer=streamer, eos_token_id=(), seed=0)
    assert streamer.seen == [*out.sequences[0].tolist(), -1]
    with pytest.raises(ConfigError, match="one sequence"):
        generate(model, draft, ids.repeat(2, 1), streamer=streamer, seed=0)


def test_statistics_count_what_was_emitted(pair) -> None:
    model, _ = pair
    _, out = both_ways(model, "oracle", 3, max_new_tokens=23, num_draft_tokens=4)
    stats = out.stats
    assert stats.num_tokens == 3 * 23
    for row in range(3):  # the oracle is right for 0, 1, ... 4 tokens in turn; the last round is cut
        assert [one.emitted for one in stats.rounds if one.row == row] == [1, 2, 3, 4, 5, 1, 2, 3, 2]
    assert stats.tau == pytest.approx(23 / 9)
    assert stats.acceptance_by_position == pytest.approx([7 / 9, 5 / 7, 2 / 4, 1 / 2])
    assert all(one.emitted <= one.accepted + 1 for one in stats.rounds)
    assert len(stats.arrival_s) == max(sum(one.row == row for one in stats.rounds) for row in range(3))
    assert 0 < stats.ttft_s <= stats.total_s
    assert set(stats.seconds) == {"prefill", "round", "host"}


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"max_new_tokens": 300}, InputError, "context is 256"),
        ({"verifier": "greedy"}, ConfigError, "temperature 0"),
        ({"verifier": "exact"}, ConfigError, "coupled, greedy, rejection"),
        ({"attention_mask": torch.ones(1, 3)}, ConfigError, "must be equal"),
        ({"attention_mask": torch.zeros(1, 9)}, InputError, "empty"),
    ],
)
def test_bad_calls_are_refused_with_both_values(pair, settings: dict, error: type[Exception], words: str) -> None:
    ids, _ = ragged_prompts(1)
    with pytest.raises(error, match=words):
        generate(pair[0], pair[1], ids, **settings, seed=0)


def test_a_saved_draft_is_loaded_and_checked_against_its_target(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(save_tiny_target(tmp_path / "target"))
    save_tiny_target(tmp_path / "draft", num_layers=1, seed=4)
    drafter = load_drafter(tmp_path / "draft", target=target)
    ids = torch.tensor([[5, 6, 7]])
    plain = generate(target, None, ids, max_new_tokens=8, eos_token_id=(), seed=0)
    assert torch.equal(
        plain.sequences, generate(target, drafter, ids, max_new_tokens=8, eos_token_id=(), seed=0).sequences
    )
    save_tiny_target(tmp_path / "other", vocab_size=310)
    with pytest.raises(InputError, match="310 vocabulary entries.*300"):
        load_drafter(tmp_path / "other", target=target)
    with pytest.raises(InputError, match="does not exist"):
        load_drafter(tmp_path / "absent", target=target)


def test_a_draft_with_another_tokenizer_of_the_same_size_is_refused(tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained(save_tiny_target(tmp_path / "target"))
    folder = save_tiny_target(tmp_path / "draft", num_layers=1)
    file = folder / "tokenizer.json"
    swapped = (
        file.read_text().replace('"!": 2', '"!": 999').replace('"\\"": 3', '"\\"": 2').replace('"!": 999', '"!": 3')
    )
    assert swapped != file.read_text()
    file.write_text(swapped)
    assert AutoTokenizer.from_pretrained(folder).get_vocab()["!"] == 3
    with pytest.raises(InputError, match="tokenizers differ"):
        load_drafter(folder, target=target)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Sampling(top_k=7), TopKLogitsWarper(7)),
        (Sampling(top_p=0.6), TopPLogitsWarper(0.6)),
        (Sampling(min_p=0.15), MinPLogitsWarper(0.15)),
    ],
)
def test_filters_are_those_of_transformers(ours: Sampling, theirs) -> None:
    logits = torch.randn(50, 33, generator=torch.Generator().manual_seed(0)) * 2
    assert torch.equal(warp(logits, ours), theirs(None, logits.clone()))


def test_distributions_are_computed_in_float32_or_wider() -> None:
    logits = torch.randn(4, 9)
    assert log_probs(logits.bfloat16(), Sampling()).dtype == torch.float32
    assert log_probs(logits.double(), Sampling(temperature=0.5)).dtype == torch.float64
    assert log_probs(logits, Sampling(temperature=0)).exp().sum(-1).tolist() == [1.0] * 4


def test_acceptance_formulas_against_hand_computed_values() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    assert overlap(p.log(), q.log()).item() == pytest.approx(0.7)
    assert tau(12, 5) == 2.4
    rounds = [Round(0, 2, 0, 1), Round(0, 2, 2, 3), Round(0, 2, 1, 2)]
    assert acceptance_by_position(rounds, 2) == [pytest.approx(2 / 3), 0.5]
    alpha = torch.tensor([[0.5, 0.5, 1.0, 0.2]])
    runs = windows(alpha, torch.tensor([[True, True, True, False]]), 2)
    assert runs.tolist() == [[0.5, 0.5], [0.5, 1.0]]
    assert expected_tau(runs) == pytest.approx(1 + (0.75 + 1.0) / 2)
    assert predicted_speedup(3.0, 4, 10.0, 1.0, 11.0) == 2.0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0},
        {"num_draft_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"rows": [0, 1]},
    ],
)
def test_values_out_of_range_are_refused(pair, settings: dict) -> None:
    ids, _ = ragged_prompts(1)
    with pytest.raises(ConfigError, match=next(iter(settings))):
        generate(pair[0], pair[1], ids, **settings, seed=0)


def test_custom_generate_refuses_processors_that_follow_the_filters(pair) -> None:
    model, draft = pair
    ids, _ = ragged_prompts(1)
    call = {"do_sample": True, "max_new_tokens": 2, "pad_token_id": 0, "custom_generate": speculative, "drafter": draft}
    with pytest.raises(ConfigError, match="TypicalLogitsWarper"):
        model.generate(ids, temperature=3.0, typical_p=0.3, **call)
    with pytest.raises(ConfigError, match="TopKLogitsWarper"):
        model.generate(ids, top_k=9, logits_processor=[TopKLogitsWarper(2)], **call)


NEW = 6
PAD = 0


@pytest.fixture
def model() -> Any:
    model = tiny_llama(VOCAB, dtype=torch.float64)
    model.generation_config.pad_token_id = PAD  # type: ignore[union-attr]
    return model


@pytest.fixture(scope="module")
def draft() -> LMDraft:
    return LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))


def padded(left: bool = True) -> tuple[Tensor, Tensor]:
    """(ids, mask): rows of 7, 6 and 5 tokens, none of which is the pad token."""
    ids = torch.randint(1, VOCAB, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(3):
        mask[row, :row] = 0
    if not left:
        mask = mask.flip(1)
    return ids.masked_fill(mask == 0, PAD), mask


def theirs(model: Any, ids: Tensor, **settings: Any) -> Tensor:
    return model.generate(ids, do_sample=False, max_new_tokens=NEW, **settings)[:, ids.shape[1] :]


def ours(model: Any, ids: Tensor, mask: Tensor | None = None, drafter: Any = None, **settings: Any) -> Tensor:
    settings = {"temperature": 0, "max_new_tokens": NEW, **settings}
    return generate(model, drafter, ids, mask, **settings, seed=0).sequences[:, ids.shape[1] :]


def test_padding_without_a_mask_is_found_as_transformers_finds_it(model: Any, draft: LMDraft) -> None:
    ids, mask = padded()
    want = theirs(model, ids)
    assert torch.equal(ours(model, ids), want)
    assert torch.equal(ours(model, ids, drafter=draft), want)
    assert torch.equal(want, theirs(model, ids, attention_mask=mask))
    assert not torch.equal(want, theirs(model, ids, attention_mask=torch.ones_like(ids)))
    assert torch.equal(theirs(model, ids, custom_generate=speculative, drafter=draft), want)


def test_padding_on_the_right_is_found_too(model: Any, draft: LMDraft) -> None:
    (left, _), (right, mask) = padded(), padded(left=False)
    alone = torch.cat([ours(model, row[kept][None]) for row, kept in zip(right, mask.bool(), strict=True)])
    assert torch.equal(ours(model, right), alone)
    assert torch.equal(ours(model, right, drafter=draft), alone)
    assert not torch.equal(left, right)


@pytest.mark.parametrize("ends", [[PAD], [5, PAD], None])
def test_a_pad_token_that_is_an_end_token_or_not_known_is_text(model: Any, ends: list[int] | None, caplog: Any) -> None:
    """transformers infers nothing there either; a batch that looks padded is warned about."""
    logging.getLogger("draftsmith").propagate = True
    ids, mask = padded()
    if ends is None:
        model.generation_config.pad_token_id = None
    else:
        model.generation_config.eos_token_id = ends
    want = theirs(model, ids)
    with caplog.at_level(logging.WARNING, "draftsmith"):
        assert torch.equal(ours(model, ids), want)
    assert ("read as text" in caplog.text) == (ends is not None)
    assert torch.equal(ours(model, ids, torch.ones_like(ids)), want)
    assert not torch.equal(ours(model, ids, mask), want)


def test_without_end_tokens_the_models_own_still_tell_padding_from_text(model: Any) -> None:
    """eos_token_id=() says where a row ends, not what its prompt holds."""
    model.generation_config.eos_token_id = PAD
    ids, _ = padded()
    assert torch.equal(ours(model, ids, eos_token_id=()), ours(model, ids, torch.ones_like(ids), eos_token_id=()))


def test_a_mask_of_ones_says_that_pad_tokens_are_text(model: Any, draft: LMDraft) -> None:
    """transformers drops such a mask before a custom method sees it."""
    ids, _ = padded()
    ones = torch.ones_like(ids)
    want = theirs(model, ids, attention_mask=ones)
    assert torch.equal(ours(model, ids, ones), want)
    assert torch.equal(theirs(model, ids, attention_mask=ones, custom_generate=speculative, drafter=draft), want)


def test_the_pad_token_of_a_call_counts(model: Any, draft: LMDraft) -> None:
    """In the prompt and behind the end, in both faces."""
    ids, mask = padded()
    other = torch.where(mask == 0, 9, torch.where(ids == 9, 8, ids))
    free = theirs(model, other, pad_token_id=9)
    assert torch.equal(ours(model, other, pad_token_id=9), free)
    end = int(free[0, 2])
    want = theirs(model, other, pad_token_id=9, eos_token_id=end)
    assert (want == 9).any()
    assert torch.equal(ours(model, other, pad_token_id=9, eos_token_id=end), want)
    asked = {"pad_token_id": 9, "eos_token_id": end, "custom_generate": speculative, "drafter": draft}
    assert torch.equal(theirs(model, other, **asked), want)


def test_rows_are_filled_with_the_first_of_several_end_tokens_where_there_is_no_pad_token(model: Any) -> None:
    model.generation_config.pad_token_id = None
    ids = padded()[0][:2, 2:]
    free = theirs(model, ids)
    model.generation_config.eos_token_id = [int(free[0, 1]), 63]
    assert torch.equal(ours(model, ids), theirs(model, ids))


@pytest.mark.parametrize("kind", [torch.bool, torch.int32, torch.float32])
def test_a_mask_may_have_holes_and_any_type(model: Any, kind: torch.dtype) -> None:
    """What is masked is left out, at the edges and between tokens, and positions go on without it."""
    ids, mask = padded()
    mask[0, 3], mask[1, 4:6] = 0, 0
    assert torch.equal(ours(model, ids, mask.to(kind)), theirs(model, ids, attention_mask=mask))


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8])
def test_ids_may_be_integers_of_any_width(model: Any, kind: torch.dtype) -> None:
    ids, mask = padded()
    out = generate(model, None, ids.to(kind), mask, temperature=0, max_new_tokens=NEW, seed=0)
    assert out.sequences.dtype == torch.int64
    assert torch.equal(
        out.sequences, generate(model, None, ids, mask, temperature=0, max_new_tokens=NEW, seed=0).sequences
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attention_mask": torch.zeros(3, 7).masked_fill_(padded()[1] == 0, -1e9)}, "give mask == 0"),
        ({"attention_mask": torch.full((3, 7), float("nan"))}, "nan"),
        ({"attention_mask": torch.full((3, 7), 2)}, r"\[2\]"),
        ({"attention_mask": [[1] * 7] * 3}, "type list"),
        ({"attention_mask": torch.ones(3, 1, 7, 7)}, "must be equal"),
        ({"input_ids": [[1, 2]]}, "type list"),
        ({"input_ids": {"input_ids": padded()[0]}}, "input_ids and"),
        ({"input_ids": padded()[0].bool()}, "torch.bool"),
    ],
    ids=str,
)
def test_what_is_no_batch_or_no_mask_is_refused(model: Any, given: dict[str, Any], words: str) -> None:
    call = {"input_ids": padded()[0], "max_new_tokens": 2} | given
    with pytest.raises(ConfigError, match=words):
        generate(model, None, **call)
