"""What the suite of families makes of rounds, seeds and paces, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from decode.stats import Round
from eval.arms.base import Sample
from eval.measure.alpha import Alphas
from eval.measure.continuations import Job, Text
from eval.modes.families import measuring as families_quality
from eval.modes.families import trainings as budgets
from eval.modes.families.arms import ArmFacts
from eval.modes.families.measuring import Judge, KeptDraft, Measurement, Speculator, _promised
from eval.modes.families.recommend import recommend, rivals
from eval.modes.families.results import Group, MeasuredFamilies, _codes, grouped, quality_row, tau_ratio, training_row
from eval.modes.families.trainings import Pace, Training, tokens_per_step
from eval.results.compared import Ratio
from tests.eval.samples import config
from tests.eval.test_families import speed_of, synthetic

REFERENCE = [Text(4, (1, 2), (5, 6, 7)), Text(9, (3,), (8, 9)), Text(11, (4,), (6, 7, 8))]
ROUNDS = {
    4: [Round(0, 2, 1, 2), Round(0, 1, 0, 1)],
    9: [Round(0, 2, 1, 2)],
    11: [Round(0, 2, 1, 2), Round(0, 1, 0, 1)],
}
"""Of the requests by their own numbers; in a batch `row` is the place there."""


class ScriptedArm:
    """Continues as the reference does, to the longest limit of the batch, or with one wrong token at first."""

    def __init__(self, wrong_row: int | None = None) -> None:
        self.wrong_row = wrong_row

    def run(self, asked: Sequence[Sequence[int]], rows: Sequence[int], max_new_tokens: int, seed: int) -> Sample:
        texts = {text.row: text for text in REFERENCE}
        new = [[*texts[row].ids[len(ids) :], 99, 99][:max_new_tokens] for row, ids in zip(rows, asked, strict=True)]
        if self.wrong_row in rows:
            new[rows.index(self.wrong_row)][0] += 20
            self.wrong_row = None
        rounds = [replace(one, row=place) for place, row in enumerate(rows) for one in ROUNDS[row]]
        return Sample(new, 1.0, 0.1, len(rows), [0.1, 1.0], rounds)


def jobs() -> list[Job]:
    return [Job(text.row, text.prompt, len(text.new)) for text in REFERENCE]


def test_rounds_are_kept_by_request_from_the_first_call_alone() -> None:
    arm: Any = ScriptedArm()
    speculate = Speculator(arm, 2, 0)
    assert {text.row: text for text in speculate(jobs())} == {text.row: text for text in REFERENCE}
    kept = {
        row: [(one.drafted, one.accepted, one.emitted) for one in rounds] for row, rounds in speculate.rounds.items()
    }
    assert kept == {row: [(one.drafted, one.accepted, one.emitted) for one in rounds] for row, rounds in ROUNDS.items()}
    before = dict(speculate.rounds)
    speculate(jobs()[:1])
    assert speculate.rounds == before


def test_a_divergence_is_judged_and_its_resumed_text_counts_no_rounds_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families_quality, "OurArm", lambda *_: ScriptedArm(wrong_row=9))
    monkeypatch.setattr(families_quality, "margin_from", lambda *_: lambda *_: 0.5)
    sizes = {"prompts": 3, "tokens": 3, "other_prompts": 1, "other_tokens": 1, "batch_size": 2}
    alphas = Alphas({4: np.array([1.0, 0.5, 0.5]), 9: np.array([1.0, 0.0]), 11: np.array([0.5])})
    monkeypatch.setattr(families_quality, "measure_alpha", lambda *_: {"": alphas})
    cfg = config(temperatures=[1.0], lossless=sizes, timing={"prompts": 1}, families={"shapes": {"chain": {}, "x": {}}})
    model: Any = SimpleNamespace(most_tokens=None)
    (found,) = Judge(cfg, model, {1.0: REFERENCE}).measure(model, ["chain"])
    assert found.model_dump() == {
        "temperature": 1.0,
        "shape": "chain",
        "num_draft_tokens": 2,
        "counts": [[3, 2], [2, 1], [3, 2]],
        "outcomes": [[1, 0, 2], [2, 1, 3]],
        "mismatches": 1,
        "near_ties": 0,
        "tokens_checked": 8,
        "promised": [(2.5 + 1.75, 2), (2.0, 1), (0.0, 0)],
    }
    quiet = SimpleNamespace(most_tokens=None)
    shallow: Any = Alphas({text.row: np.ones((2, 1)) for text in REFERENCE})
    assert _promised(shallow, REFERENCE, cfg.decode, cast(Any, quiet)) is None  # decoding goes on where unrolling ends
    adaptive = replace(cfg.decode, adaptive=True)
    assert _promised(alphas, REFERENCE, adaptive, cast(Any, quiet)) is None


def test_a_step_reads_all_rows_of_all_micro_steps_filled_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = SimpleNamespace(rows=[0, 1, 2, 3], num_tokens=100)
    monkeypatch.setattr(budgets, "record_sequences", lambda *_: None)
    monkeypatch.setattr(budgets, "PackedSource", SimpleNamespace(of=lambda *_: packed))
    train: Any = SimpleNamespace(batch_size=2, gradient_accumulation=3, sequence_length=64)
    assert tokens_per_step(train, train) == 6 * 25


def test_a_pace_is_tokens_over_seconds_and_steps_over_seconds() -> None:
    pace = Pace(steps=20, tokens=800, seconds=4.0)
    assert (pace.tokens_per_s, pace.steps_for_seconds(1.5)) == (200.0, 8)


def entry(seed: int, counts: list[list[int]], pace: Pace | None = None) -> KeptDraft:
    measured: dict[str, Any] = {"temperature": 1.0, "num_draft_tokens": 2, "counts": counts, "outcomes": [[2, 1, 4]]}
    measured |= {"mismatches": 1, "near_ties": 2, "tokens_checked": 10}
    shapes = [Measurement(shape=shape, **measured) for shape in ("chain", "tree")]
    return KeptDraft(seed=seed, pace=pace, measured=shapes, seconds=1.0)


def test_what_training_took_is_a_mean_over_seeds() -> None:
    entries = [entry(0, [], Pace(10, 300, 3.0)), entry(1, [], Pace(20, 500, 1.0))]
    row = training_row(Group("a", "time", "bf16"), entries, ArmFacts("lm", 1, (), "adamw"), 0.0)
    assert (row.steps, row.tokens, row.seconds, row.tokens_per_s) == (15.0, 400.0, 2.0, 200.0)
    assert (row.seconds_by_seed, row.seeds, row.family) == ([3.0, 1.0], 2, "lm")


def test_entries_are_grouped_by_what_was_trained_and_ordered_by_seed() -> None:
    kept = {Training("a", "tokens", "bf16", seed): entry(seed, [[1, 1]]) for seed in (2, 0, 1)}
    kept |= {Training("a", "time", "bf16", 0): entry(0, []), Training("a", "tokens", "int8", 0, True): entry(0, [])}
    found = grouped(kept)
    assert [one.seed for one in found[Group("a", "tokens", "bf16")]] == [0, 1, 2]
    assert len(found) == 3


def test_tau_of_a_group_is_pooled_and_its_outcomes_are_counted_as_often_as_they_came() -> None:
    one, two = entry(0, [[6, 2], [1, 4]]).measured[0], entry(1, [[3, 3], [2, 1]]).measured[0]
    one = one.model_copy(update={"outcomes": [[2, 2, 1], [2, 0, 3]]})
    row = quality_row(Group("a", "tokens", "bf16"), [one, two], 0)
    assert (row.expected_tau, row.expected_tau_ci95) == (None, None)
    promised = [
        one.model_copy(update={"promised": rounds})
        for rounds in ([(2.0, 1), (1.0, 1), (0.0, 0)], [(2.0, 1), (1.0, 1), (0.0, 0)])
    ]
    expected = quality_row(Group("a", "tokens", "bf16"), promised, 0)
    assert (expected.expected_tau, expected.expected_tau_ci95) == (6 / 4, [1.0, 2.0])  # of the prompts that have rounds
    assert row.tau == 12 / 10
    assert row.tau_by_seed == [7 / 6, 5 / 4]
    assert row.acceptance_by_position == [5 / 8, 1 / 5]
    assert (row.mismatches, row.near_ties, row.tokens_checked) == (2, 4, 20)


def test_a_code_is_held_against_the_first_one_seed_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.modes.families.results._bytes", lambda *_: 8.0)
    codes = {"arms": {"a": ["draft=eagle3"]}, "feature_arm": "a", "feature_codes": ["bf16", "int8"]}
    cfg = config(temperatures=[1.0], families={**codes, "seeds": [0, 1], "feature_seeds": [1], "shapes": {"chain": {}}})
    kept = {
        Training("a", "tokens", "bf16", 0): entry(0, [[100, 1], [100, 1]]),
        Training("a", "tokens", "bf16", 1): entry(1, [[4, 2], [2, 2]]),
        Training("a", "tokens", "int8", 1, True): entry(1, [[3, 2], [3, 4]]),
    }
    run: Any = MeasuredFamilies(None, {}, {}, kept, [], [], 0.0, {})  # type: ignore[arg-type]
    first, coarse = _codes(cfg, grouped(kept), run)
    assert (first.code, first.tau_ratio, first.tau_ratio_ci95) == ("bf16", 1.0, [1.0, 1.0])
    assert (coarse.code, coarse.tau_ratio) == ("int8", (6 / 6) / (6 / 4))
    assert coarse.tau_ratio_ci95 == pytest.approx([2 / 3, 0.75])  # either prompt alone gives 3/4


def test_a_ratio_of_taus_is_ours_over_the_others() -> None:
    ours, other = entry(0, [[6, 2], [6, 2]]).measured[:1], entry(0, [[4, 2], [4, 2]]).measured[:1]
    assert tau_ratio(ours, other, 0).value == 1.5


def test_a_rival_is_who_reaches_into_the_best_ones_interval() -> None:
    ends = {"best": [1.8, 2.2], "near": [1.6, 1.8], "far": [1.6, 1.79]}
    assert rivals("best", {name: Ratio(value=1.7, ci95=ci95) for name, ci95 in ends.items()}) == ["near"]


def test_a_draft_is_advised_only_where_its_whole_interval_is_above_one() -> None:
    for low, use in ((1.01, "a with k=3"), (0.99, "plain decoding, no draft")):
        rows = [speed_of("a", 1.5).model_copy(update={"speedup_ci95": [low, 2.0]})]
        found = synthetic().model_copy(update={"rows": rows, "quality": [], "codes": []})
        assert [one.use for one in recommend(found)] == [use]
