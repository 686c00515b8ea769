"""What a certificate counts: mismatches, near-ties, tokens and shares of the time, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from eval.measure import certificate_parts as comparison
from eval.measure.certificate_parts import Counts, Departure, Part, State, compare, is_done
from eval.measure.continuations import Job, Text
from eval.measure.losslessness import MARGIN
from eval.modes.certificate import CertifiedPart, _row, failures, parts_of
from tests.eval.samples import config, prompts

DEPARTURE = Departure(prompt="p", row=0, position=1, target_token=1, speculative_token=2, top2_margin=0.1, gap=None)
JUDGED = Part("float32", 0.0, tokens=10, is_judged=True)
LISTED = Part("bfloat16", 0.0, tokens=10, is_judged=False)
SCORES = {1: [0.0, -MARGIN / 2, -9.0], 2: [0.0, -0.25, -2.0], 4: [0.0, -9.0, -9.0]}
"""By place: of the tokens 0, 1 and 2. The target writes 0 everywhere."""


def compared(monkeypatch: pytest.MonkeyPatch, folder: Path, part: Part) -> Counts:
    """Two prompts of 5 tokens, of which the second is 1 at place 1, 2 at place 2, and over before its last token."""
    wrong = {1: 1, 2: 2}

    def continue_batch(_: object, drafter: object, settings: Any, seed: int, jobs: Sequence[Job]) -> list[Text]:
        texts = []
        for job in jobs:
            start = len(job.prompt) - 4
            new = [0] * job.max_new
            if drafter is not None and job.row == 1:
                new = [wrong.get(start + i, 0) for i in range(job.max_new)][: 4 - start]
            texts.append(Text(job.row, job.prompt, tuple(new)))
        return texts

    def scores_at(*given: Any) -> torch.Tensor:
        assert (given[2], given[3].row) == (7, 1)
        return torch.tensor(SCORES[given[4]])

    monkeypatch.setattr(comparison, "continue_batch", continue_batch)
    monkeypatch.setattr(comparison, "scores_at", scores_at)
    monkeypatch.setattr(comparison, "processors_of", lambda *_: None)
    monkeypatch.setattr(comparison, "check_uncached", lambda *_: [], raising=False)
    sizes = {"prompts": 12, "tokens": 5, "other_prompts": 1, "other_tokens": 1, "batch_size": 2}
    state, model = State.open(folder / "progress.json", [part]), cast(Any, object())
    compare(config(lossless=sizes, seed=7), model, model, prompts(2), part, state, float("inf"))
    return State.open(folder / "progress.json", [part]).parts[part.name]  # as a run that goes on would find it


def test_every_divergence_is_a_near_tie_or_a_mismatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = compared(monkeypatch, tmp_path, JUDGED)
    assert (found.near_ties, found.mismatches) == (1, 2)  # a text that is over too early is no matter of margins
    assert (found.chunks, found.sequences, found.tokens) == (1, 2, 10)
    assert [one.gap for one in found.divergences] == [pytest.approx(MARGIN / 2), 2.0, None]
    assert [one.top2_margin for one in found.divergences] == pytest.approx([MARGIN / 2, 0.25, 9.0])
    assert [one.position for one in found.divergences] == [4 + 1, 4 + 2, 4 + 4]
    assert [one.speculative_token for one in found.divergences] == [1, 2, None]
    assert {(one.prompt, one.row, one.target_token) for one in found.divergences} == {("p1", 1, 0)}


def test_divergences_in_the_targets_own_precision_are_listed_and_not_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = compared(monkeypatch, tmp_path, LISTED)
    assert (found.near_ties, found.mismatches, len(found.divergences)) == (0, 0, 3)


def test_a_part_is_done_when_its_tokens_are_compared_or_its_time_is_spent() -> None:
    assert is_done(JUDGED, Counts(chunks=1, tokens=10), 9.0)
    assert not is_done(JUDGED, Counts(chunks=1, tokens=9, seconds=8.0), 9.0)
    assert is_done(JUDGED, Counts(chunks=1, tokens=9, seconds=9.0), 9.0)
    assert not is_done(JUDGED, Counts(seconds=9.0), 9.0)  # one chunk at least


def test_what_a_part_leaves_of_its_time_goes_to_those_after_it(tmp_path: Path) -> None:
    parts = [JUDGED, replace(JUDGED, temperature=1.0, tokens=20), replace(LISTED, tokens=30)]
    state = State.open(tmp_path / "progress.json", parts)
    assert [state.allowed_s(part, parts, 1.0) for part in parts] == [10.0, 24.0, 60.0]
    state.parts[parts[0].name].seconds, state.parts[parts[1].name].seconds = 5.0, 15.0
    assert [state.allowed_s(part, parts, 1.0) for part in parts[1:]] == [22.0, 40.0]
    assert state.allowed_s(parts[0], parts, None) == float("inf")


def test_the_rate_is_divergences_per_token_compared(tmp_path: Path) -> None:
    state = State.open(tmp_path / "progress.json", [JUDGED])
    assert _row(JUDGED, state).divergences_per_token is None
    state.parts[JUDGED.name] = Counts(chunks=3, sequences=4, tokens=40, divergences=[DEPARTURE, DEPARTURE])
    assert _row(JUDGED, state).divergences_per_token == 2 / 40


def test_most_tokens_are_greedy_ones_in_the_wide_precision_which_alone_is_judged() -> None:
    cfg = config(certificate={"tokens": 9, "other_tokens": 4}, temperatures=[0.7, 0.0])
    assert parts_of(cfg, "bfloat16") == [
        Part("float32", 0.0, 9, True),
        Part("float32", 0.7, 4, True),
        Part("bfloat16", 0.0, 4, False),
        Part("bfloat16", 0.7, 4, False),
    ]


def test_a_mismatch_fails_and_a_listed_divergence_does_only_with_strict() -> None:
    row: dict[str, Any] = {"tokens": 1000, "dtype": "float32", "temperature": 1.0, "divergences": [DEPARTURE] * 3}
    wrong, listed = (CertifiedPart.model_construct(**row, mismatches=n, uncached_mismatches=0) for n in (2, 0))
    assert failures([wrong], strict=False) == ["2 mismatches in 1,000 tokens (float32, T=1)"]
    assert failures([listed], strict=False) == []
    assert len(failures([listed], strict=True)) == 1
