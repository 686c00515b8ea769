"""Rows of a report and of a suite's cell against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decode.sampling.config import SamplingConfig
from decode.stats import Round
from eval.arms.base import AUTOREGRESSIVE, TRANSFORMERS
from eval.measure.alpha import Alphas
from eval.measure.losslessness import Check
from eval.measure.quality import Quality
from eval.measure.timed_run import Samples
from eval.results.figures import (
    Drafted,
    Scope,
    acceptance,
    baseline,
    call_ratio,
    dtype_flips,
    latency,
    make_row,
    quality_figures,
    repetition,
    speed_ratio,
    tokens_per_s,
    typical_tau,
    uncached_flips,
)
from eval.results.schema import ComponentTimes, Row
from eval.results.statistics import Estimate
from tests.eval.samples import ALL, NONE, ONE, at_paces, sample, timed_samples

ARM = "d k=2"
COSTS = ComponentTimes(num_draft_tokens=2, t_target_1_s=0.4, t_target_k1_s=0.5, t_draft_s=0.05)
TAU = 14 / 9  # rounds emit 6 + 5 + 3 tokens, and there are 2 + 5 + 2
PREDICTED = 1.0 * 0.4 / (2 * 0.05 + 0.5)  # after the first arrival prompts emit 3, 1 and 1 tokens a pass
CHAIN = Drafted(ARM, "lm", "d", SamplingConfig(num_draft_tokens=2))
ALPHAS = Alphas({0: np.array([0.5, 0.5]), 1: np.array([1.0]), 2: np.array([0.25]), 9: np.array([0.0])})
CHECKS = {0: Check(0, 1, 10), 1: Check(1, 0, 5), 9: Check(9, 9, 9)}
EVERYTHING = Scope("code", range(3), range(4), units=["a", "a", "b", "c"])
SPEEDS = {
    "tokens_per_s": 5.0,
    "baseline": AUTOREGRESSIVE,
    "baseline_tokens_per_s": 2.5,
    "speedup": 2.0,
    "speedup_ci95": [1.0, 4.0],
    "whole_call_speedup": 4.5 / 2.4,
    "whole_call_speedup_ci95": [4.5 / 5.2, 4.5 / 1.2],
    "component_times": {"num_draft_tokens": 2, "t_target_1_s": 0.4, "t_target_k1_s": 0.5, "t_draft_s": 0.05},
}
MEASURED = {
    "prompts": 3,
    "tokens": 33,
    "tau": TAU,
    "tau_ci95": [1.0, 3.0],
    "acceptance_by_position": [3 / 9, 2 / 3],
    **SPEEDS,
    "predicted_speedup": PREDICTED,
    "realised": 2.0 / PREDICTED,
    "realised_ci95": [1.0 / (0.4 / 0.6), 2.0 / PREDICTED],  # the least: the prompt at 1 time the speed and tau 1
    "ttft_s": 0.4,
    "itl_s": {"p50": 0.2, "p95": 0.38},
    "dtype_flips": 1,
    "dtype_tokens_compared": 11 + 4 + 11,
    "repeated_4gram_share": 1 / 24,
    "energy_j_per_token": None,
    "energy_reason": "no energy meter stood around these calls",
    "peak_memory_bytes": 7,
}


def check_fields(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(expected) <= set(row)
    for name, value in expected.items():
        assert row[name] == (value if isinstance(value, str) else pytest.approx(value)), name


def row_of(
    scope: Scope = EVERYTHING,
    checks: dict[int, Check] | None = CHECKS,
    samples: Samples | None = None,
    costs: ComponentTimes | None = COSTS,
    **settings: Any,
) -> dict[str, Any]:
    """The whole row as results.json has it: its timed half, and what its draft's quality fills."""
    one = replace(CHAIN, settings=replace(CHAIN.settings, **settings))
    row = make_row(one, scope, samples or timed_samples(ARM), costs, None, 1, "bfloat16", 3)
    return row.model_copy(update=quality_figures(Quality(ALPHAS, checks), scope, 3)).model_dump()


def test_every_figure_of_a_row_is_that_worked_out_by_hand() -> None:
    identity = {"drafter": "lm", "draft": "d", "verifier": "coupled", "tree": "chain", "dtype": "bfloat16"}
    place = {"text": "code", "category": None, "temperature": 1.0, "batch_size": 1, "num_draft_tokens": 2, "seed": 3}
    alpha = {"alpha": 2.25 / 4, "alpha_ci95": [0.25, 2 / 3], "alpha_tokens": 4}
    checked = {"mismatches": 1, "near_ties": 1, "tokens_checked": 15}
    check_fields(row_of(), {**identity, **place, **alpha, **checked, **MEASURED})
    assert isinstance(row_of()["alpha_tokens"], int)


def test_a_timed_row_leaves_open_what_a_timed_run_does_not_tell() -> None:
    one = replace(CHAIN, setting="chain2")
    row = make_row(one, Scope("code", range(3)), timed_samples(ARM), COSTS, None, 1, "bfloat16", 3).model_dump()
    own = {"setting": "chain2", "alpha": None, "alpha_ci95": None, "alpha_tokens": 0}
    own |= {"mismatches": None, "near_ties": None, "tokens_checked": 0, "uncached_mismatches": None}
    check_fields(row, {**own, **MEASURED})
    tree = make_row(one, Scope("code", range(3)), timed_samples(ARM), None, None, 1, "bfloat16", 3)
    assert (tree.component_times, tree.predicted_speedup, tree.realised) == (None, None, None)


def test_a_row_says_how_many_rounds_were_drafted_ahead() -> None:
    samples = timed_samples(ARM)
    told = [replace(ALL, ahead=True), replace(ALL, ahead=False), replace(ALL, ahead=True), replace(NONE, ahead=None)]
    samples[ARM] = [[replace(group[0], rounds=told)] for group in samples[ARM]]
    assert row_of(samples=samples, costs=None)["ahead_share"] == pytest.approx(2 / 3)
    assert row_of()["ahead_share"] is None


def test_results_are_read_back_by_the_class_that_wrote_them() -> None:
    row = row_of()
    assert Row.model_validate(row).model_dump() == row
    for wrong in ({"speedup": "2"}, {"alpha": 1.5}, {"tau": float("nan")}, {"speed": 1.0}, {"tau_ci95": [1.0]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Row.model_validate({**row, **wrong})


def test_flips_against_an_uncached_forward_are_those_of_the_groups_of_the_row() -> None:
    checks = [Check(1, 2, 10), Check(0, 1, 5), Check(9, 9, 9)]
    assert uncached_flips(checks, [0, 1]) == {"uncached_dtype_flips": 4, "uncached_dtype_tokens": 15}
    assert uncached_flips(None, [0]) == {"uncached_dtype_flips": None, "uncached_dtype_tokens": 0}


def test_a_category_is_judged_by_its_own_prompts_alone() -> None:
    row = row_of(Scope("code", [1, 2], [1, 2], "chat", ["a", "b"]))
    assert (row["category"], row["prompts"], row["tokens"], row["tokens_checked"]) == ("chat", 2, 22, 5)
    assert row["alpha"] == 1.25 / 2
    assert row["tau"] == 8 / 7
    assert row["tokens_per_s"] == (5 + 2.5) / 2
    assert row["baseline_tokens_per_s"] == 6.0  # of the last two prompts transformers answers one at 10
    assert row["baseline"] == TRANSFORMERS
    assert row["speedup"] == pytest.approx((0.5 / 0.2 + 0.1 / 0.4) / 2)
    assert row["dtype_tokens_compared"] == 4 + 11
    assert row["repeated_4gram_share"] == 0
    assert row["predicted_speedup"] == pytest.approx(0.4 / 0.6)


def test_only_a_plain_chain_is_predicted_and_what_was_not_counted_is_null() -> None:
    row = row_of(checks=None, tree="2x1", verifier="rejection")
    assert (row["tree"], row["verifier"], row["predicted_speedup"], row["realised"]) == ("2x1", "rejection", None, None)
    assert (row["mismatches"], row["near_ties"], row["tokens_checked"]) == (None, None, 0)
    assert (row["dtype_flips"], row["dtype_tokens_compared"]) == (None, 0)
    unknown = row_of(Scope("code", range(3), [5], units=["c"]))
    assert (unknown["alpha"], unknown["alpha_ci95"], unknown["alpha_tokens"]) == (None, None, 0)


def test_prompts_of_a_batch_are_counted_once_however_many_rounds_answer_them() -> None:
    batch = [sample([[1] * 11, [2] * 6], rounds=[NONE]) for _ in range(3)]
    samples = {name: [batch] for name in (ARM, AUTOREGRESSIVE, TRANSFORMERS)}
    row = row_of(Scope("code", [0], [0]), None, samples)
    assert (row["prompts"], row["tokens"], row["dtype_tokens_compared"]) == (2, 3 * 17, 3 * 17)


def test_a_prompt_that_came_at_once_has_no_speedup() -> None:
    at_once = {name: [[sample([[1]], rounds=[NONE])]] for name in (ARM, AUTOREGRESSIVE, TRANSFORMERS)}
    row = row_of(Scope("code", [0], [0]), None, at_once)
    for name in ("tokens_per_s", "baseline_tokens_per_s", "speedup", "speedup_ci95", "predicted_speedup", "realised"):
        assert row[name] is None, name
    assert (row["whole_call_speedup"], row["whole_call_speedup_ci95"]) == (1.0, None)  # one prompt has no interval
    assert row["seconds_by_prompt"] == [None]


def test_a_speedup_is_the_others_time_over_ours() -> None:
    samples = {"ours": at_paces(0.1, 0.1, 0.1), "other": at_paces(0.2, 0.3, 0.7)}
    found = speed_ratio(samples, "ours", "other", range(3), 0)
    assert found is not None
    assert found.value == pytest.approx(3.0)
    assert found.ci95 == pytest.approx((2.0, 7.0))


def test_a_whole_calls_speedup_counts_the_reading_of_the_prompt() -> None:
    samples = {"ours": at_paces(0.1, first_s=2.0), "other": at_paces(0.3, first_s=1.0)}
    found = call_ratio(samples, "ours", "other", [0], 0)
    assert found is not None
    assert found.value == pytest.approx(4.0 / 3.0)  # decoding alone would be 3 times as fast


def test_a_ratio_is_of_the_prompts_that_both_have_times_for() -> None:
    nothing_after = [sample([[1]])]
    samples = {"ours": [*at_paces(0.1), nothing_after, *at_paces(0.2)], "other": [*at_paces(0.2, 0.9), nothing_after]}
    assert speed_ratio(samples, "ours", "other", range(3), 0) == Estimate(0.2 / 0.1, None)
    assert speed_ratio(samples, "ours", "other", [1, 2], 0) is None
    assert tokens_per_s(samples["ours"], range(3)) == pytest.approx((10 + 5) / 2)
    assert tokens_per_s(samples["ours"], [1]) is None


def test_the_speed_of_an_arm_is_the_median_prompts() -> None:
    assert tokens_per_s(at_paces(0.1, 0.2, 1.0), range(3)) == pytest.approx(5.0)  # the mean is 5.33
    assert tokens_per_s(at_paces(0.1, 0.2, 1.0), [2]) == pytest.approx(1.0)


@pytest.mark.parametrize(("alone", "theirs"), [(0.2, 0.3), (0.3, 0.2)])
def test_the_baseline_is_the_faster_way_without_a_draft(alone: float, theirs: float) -> None:
    samples = {
        AUTOREGRESSIVE: at_paces(alone, 9.0),
        TRANSFORMERS: at_paces(theirs, 0.01),
        "d k=2": at_paces(0.01, 0.01),
    }
    assert baseline(samples, [0]) == (AUTOREGRESSIVE if alone < theirs else TRANSFORMERS)


def test_an_arm_without_times_is_no_baseline() -> None:
    samples = {AUTOREGRESSIVE: [[sample([[1]])]], TRANSFORMERS: at_paces(2.0)}
    assert baseline(samples, [0]) == TRANSFORMERS


def test_tau_counts_the_bonus_token_and_is_pooled_over_rounds() -> None:
    samples = [[sample(rounds=[ALL, ALL])], [sample(rounds=[NONE] * 3), sample(rounds=[NONE] * 3)]]
    assert acceptance(samples, 2, 0)["tau"] == 12 / 8  # the mean over prompts is 2, and accepted tokens alone give 0.5


def test_a_decoder_that_loses_nothing_realises_what_is_predicted_however_prompts_differ() -> None:
    """Rounds take as long as their passes. Over all passes tau is 1.7, which would promise half of what is measured."""
    passes, taken = COSTS.t_target_k1_s + 2 * COSTS.t_draft_s, [NONE, Round(0, 2, 2, 3), Round(0, 2, 2, 3)]
    ours = []
    for one in taken:
        rounds = [NONE, *[one] * (12 // one.emitted)]
        ours.append([sample([[1] * 13], passes / one.emitted, rounds=rounds)])
    alone = at_paces(*[COSTS.t_target_1_s] * 3)
    row = row_of(Scope("code", range(3)), None, {ARM: ours, AUTOREGRESSIVE: alone, TRANSFORMERS: alone})
    assert row["tau"] == 39 / 23
    assert row["predicted_speedup"] == pytest.approx(3 * 0.4 / 0.6)
    assert row["realised"] == pytest.approx(1.0)
    assert row["realised_ci95"] == pytest.approx([1.0, 1.0])  # whichever prompts are drawn, with their own tau


def test_a_prompts_tau_is_that_after_its_first_arrival_over_all_its_rounds() -> None:
    both = [sample(rounds=[ALL, NONE, NONE, ONE]), sample(rounds=[ALL, ONE])]
    assert typical_tau([both]) == 6 / 4
    batch = sample([[1] * 11, [2] * 11], rounds=[ALL, ALL, NONE, ONE])
    assert typical_tau([[batch]]) == 3 / 2
    assert typical_tau([[sample(rounds=[ALL])]]) is None


def test_what_intervals_are_made_of_is_kept_by_prompt_and_document() -> None:
    row = row_of()
    assert row["passes_by_prompt"] == [[6, 2], [5, 5], [3, 2]]
    assert row["seconds_by_prompt"] == [pytest.approx(pair) for pair in ([0.4, 0.1], [0.4, 0.2], [0.4, 0.4])]
    assert row["call_seconds_by_prompt"] == [
        pytest.approx([4.5 / 11, seconds / 11]) for seconds in (0.2 + 1.0, 0.4 + 2.0, 1.2 + 4.0)
    ]
    assert row["alpha_by_document"] == [[2.0, 3.0], [0.25, 1.0]]


def test_the_interval_of_tau_resamples_prompts_not_rounds() -> None:
    samples = [[sample(rounds=[ALL] * 4)], [sample(rounds=[NONE] * 4)]]
    # One prompt is drawn twice in a quarter of the resamples each; eight equal rounds in 1 of 256.
    assert acceptance(samples, 2, 0)["tau_ci95"] == [1.0, 3.0]


def test_acceptance_at_a_position_is_given_that_those_before_were_accepted() -> None:
    found = acceptance([[sample(rounds=[ALL, NONE, NONE, Round(0, 1, 1, 2)])]], 3, 0)
    assert found["acceptance_by_position"] == [0.5, 1.0, None]  # one round of two drafted a second token


def test_latency_is_in_seconds_and_gaps_lie_within_a_call() -> None:
    arrivals = [[[1.0, 1.1, 1.3]], [[2.0, 2.4], [9.0]]]
    calls = [[sample(first_s=times[0], arrivals=times) for times in rounds] for rounds in arrivals]
    assert latency(calls) == {"ttft_s": 2.0, "itl_s": pytest.approx({"p50": 0.2, "p95": 0.38})}


def test_flips_are_counted_against_our_own_loop() -> None:
    samples = {"d": [[sample([[1, 2, 3]])]], AUTOREGRESSIVE: [[sample([[1, 2, 4]])]], TRANSFORMERS: [[sample([[9]])]]}
    assert dtype_flips(samples, "d", [0], "coupled") == {"dtype_flips": 1, "dtype_tokens_compared": 3}
    assert dtype_flips(samples, "d", [0], "greedy") == {"dtype_flips": 1, "dtype_tokens_compared": 3}
    assert dtype_flips(samples, "d", [0], "block") == {"dtype_flips": None, "dtype_tokens_compared": 0}


def test_repetition_is_a_share_of_all_runs_of_four() -> None:
    assert repetition([[sample([[7] * 10, [1, 2, 3, 4]])], [sample([[1, 2, 3, 4, 5]])]]) == 6 / 10
    assert repetition([[sample([[1, 2, 3]])]]) is None
