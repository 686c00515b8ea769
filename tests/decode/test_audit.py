"""Logits processors that are no functions of the prefix: refused where they are known, found by the audit elsewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)
from transformers.generation.logits_process import EncoderRepetitionPenaltyLogitsProcessor

from decode import generate, speculative
from decode.common.errors import ConfigError
from decode.drafters.lm import LMDraft
from tests.decode.checks import VOCAB, RolledByPrefix, ragged_prompts
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(VOCAB, dtype=torch.float64)


class EverySeventhCall(LogitsProcessor):
    """Bans a token in every seventh call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.tensor([3]), -torch.inf) if self.calls % 7 == 0 else scores


class AfterTenCalls(EverySeventhCall):
    """Lets the text free after ten calls: a schedule that counts calls as tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.tensor([3]), -torch.inf) if self.calls <= 10 else scores


class LastTokenOfTheCallBefore(LogitsProcessor):
    """A grammar that goes on by one token a call."""

    def __init__(self) -> None:
        self.state = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.state += int(input_ids[0, -1])
        return scores.roll(self.state, 1)


class ByRow(LogitsProcessor):
    """Another bias for each row of the batch."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.randn(scores.shape[1], generator=torch.Generator().manual_seed(1)) * torch.arange(
            len(scores)
        )[:, None].to(scores.dtype)


class Random(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand_like(scores)


class WritesToIds(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        input_ids[:, -1] = 0
        return scores


class BansAll(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf)


class MakesNan(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([3]), torch.nan)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (EverySeventhCall, "EverySeventhCall.*answered otherwise"),
        (AfterTenCalls, "AfterTenCalls.*answered otherwise"),
        (LastTokenOfTheCallBefore, "LastTokenOfTheCallBefore.*answered otherwise"),
        (ByRow, "ByRow.*answered otherwise"),
        (Random, "Random.*answered otherwise"),
        (WritesToIds, "WritesToIds writes to the input_ids"),
        (BansAll, "BansAll leaves scores.*no token at all"),
        (MakesNan, "MakesNan leaves scores that are nan"),
    ],
)
def test_the_audit_names_a_processor_that_is_no_function_of_the_prefix(
    model: Any, kind: type[LogitsProcessor], words: str, drafted: bool
) -> None:
    ids, mask = ragged_prompts(2)
    ids, mask = ids[:, 1:], mask[:, 1:]  # one of them has no padding left: rows of equal length share a call
    mask[:] = 1
    call: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": ()}
    processors = [RepetitionPenaltyLogitsProcessor(1.1), kind()]
    with pytest.raises(ConfigError, match=words):
        generate(
            model,
            LMDraft(model) if drafted else None,
            ids,
            mask,
            logits_processor=processors,
            audit=True,
            **call,
            seed=0,
        )


def test_the_audit_finds_nothing_wrong_with_functions_of_the_prefix(model: Any) -> None:
    """Ours and transformers', on chains and trees, and the text is the one without the audit."""
    ids, mask = ragged_prompts(2)
    processors = [RolledByPrefix(), NoRepeatNGramLogitsProcessor(2), WatermarkLogitsProcessor(VOCAB, "cpu")]
    call: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": (), "logits_processor": processors}
    call |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {3: 2.0}, "banned_words": [7]}
    plain = generate(model, None, ids, mask, **call, seed=0)
    for tree in ("chain", "2x1"):
        out = generate(model, LMDraft(model), ids, mask, tree=tree, num_draft_tokens=2, audit=True, **call, seed=0)
        assert torch.equal(out.sequences, plain.sequences)


def test_the_audit_is_there_for_custom_generate(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    asked = {"do_sample": False, "max_new_tokens": 8, "custom_generate": speculative, "drafter": LMDraft(model)}
    with pytest.raises(ConfigError, match="EverySeventhCall"):
        model.generate(ids, logits_processor=[EverySeventhCall()], audit=True, **asked)


def test_the_audit_keeps_the_ledger_of_random_numbers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from decode.sampling.noise import Ledger

    seen = []
    monkeypatch.setattr(Ledger, "enter", lambda self, *given: seen.append(given))
    ids, _ = ragged_prompts(1)
    generate(model, LMDraft(model), ids, max_new_tokens=4, verifier="rejection", audit=True, seed=0)
    assert seen


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda ids, scores: scores[:, :5], r"<lambda> was given scores \(\(1, 64\).*returned \(\(1, 5\)"),
        (lambda ids, scores: scores[0], r"returned \(\(64,\)"),
        (lambda ids, scores: scores > 0, "torch.bool"),
        (lambda ids, scores: scores.argmax(-1), "torch.int64"),
        (lambda ids, scores: scores.to("meta"), "meta"),
        (lambda ids, scores: None, "NoneType"),
    ],
)
def test_what_is_not_scores_of_the_same_rows_is_refused(model: Any, returned: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(model, None, ragged_prompts(1)[0], max_new_tokens=2, logits_processor=[returned], seed=0)


def test_scores_of_another_precision_are_taken(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    call: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0, "eos_token_id": ()}
    halved = generate(model, None, ids, logits_processor=[lambda ids, scores: scores.float()], **call, seed=0)
    assert torch.equal(halved.sequences, generate(model, None, ids, **call, seed=0).sequences)


def test_scores_changed_in_place_are_nobody_elses(model: Any) -> None:
    ids, mask = ragged_prompts(2)
    call: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": ()}
    shifted = [lambda ids, scores: scores.add_(ids.double().mean(-1, keepdim=True)).roll(3, 1)]
    copied = [lambda ids, scores: (scores + ids.double().mean(-1, keepdim=True)).roll(3, 1)]
    out = generate(model, LMDraft(model), ids, mask, logits_processor=shifted, **call, seed=0)
    assert torch.equal(
        out.sequences, generate(model, None, ids, mask, logits_processor=copied, **call, seed=0).sequences
    )


def test_a_single_processor_need_not_stand_in_a_list(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    call: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": ()}
    both = (RolledByPrefix(), [RolledByPrefix()])
    alone, listed = (generate(model, None, ids, logits_processor=one, **call, seed=0) for one in both)
    assert torch.equal(alone.sequences, listed.sequences)


def test_what_is_no_processor_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="'no'.*cannot be called"):
        generate(model, None, ragged_prompts(1)[0], logits_processor=["no"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "processor",
    [
        UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None),
        SynthIDTextWatermarkLogitsProcessor(5, [1, 2, 3], 16, 0, 4, device="cpu"),  # type: ignore[arg-type]
        EncoderRepetitionPenaltyLogitsProcessor(1.2, torch.tensor([[1, 2]])),  # type: ignore[arg-type]
    ],
    ids=lambda one: type(one).__name__,
)
def test_processors_of_transformers_that_go_by_rows_or_calls_are_refused(model: Any, processor: Any) -> None:
    ids, mask = ragged_prompts(2)
    with pytest.raises(ConfigError, match=re.escape(type(processor).__name__)):
        generate(model, None, ids, mask, max_new_tokens=2, logits_processor=[processor], seed=0)


def test_a_constraint_on_a_single_request_is_kept(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    allowed = PrefixConstrainedLogitsProcessor(lambda row, prefix: [5, 6 + int(prefix[-1]) % 2], 1)
    call: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": (), "logits_processor": [allowed]}
    plain = generate(model, None, ids, **call, seed=0)
    assert set(plain.sequences[0, ids.shape[1] :].tolist()) <= {5, 6, 7}
    assert torch.equal(generate(model, LMDraft(model), ids, tree="2x1", **call, seed=0).sequences, plain.sequences)
