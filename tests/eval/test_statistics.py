"""Bootstrap intervals against cases that can be computed by hand, and the counts beside them."""

import numpy as np
import pytest

from eval.modes.families.results import _OWN as OF_FAMILIES
from eval.results.document import DEFINITIONS
from eval.results.statistics import (
    Estimate,
    bootstrap,
    bootstrap_crossed,
    finite,
    inter_arrivals,
    median_of_ratios,
    quantiles,
    ratio_of_ratios,
    ratio_of_sums,
    repeated_4grams,
    share,
)


def test_ratio_of_sums_weighs_prompts_by_their_tokens():
    columns = np.array([[1.0, 1.0], [1.0, 9.0]])
    estimate = bootstrap(columns, ratio_of_sums, seed=0)
    assert estimate.value == pytest.approx(0.2)  # (1 + 1) / (1 + 9), not the mean of 1 and 1/9
    # Resamples of two prompts: {a,a} 1/4 of the time, {a,b} 1/2, {b,b} 1/4, so 2.5% and 97.5% fall on the outer two.
    assert estimate.ci95 == pytest.approx((1 / 9, 1.0))


def test_bootstrap_quantiles_follow_the_binomial_distribution():
    values = np.array([[1.0, 1.0]] * 5 + [[0.0, 1.0]] * 5)
    estimate = bootstrap(values, ratio_of_sums, seed=1, resamples=40_000)
    # The number of ones among 10 draws is Binomial(10, 1/2): P(<=1) = 0.0107, P(<=2) = 0.0547, and the mirror above.
    assert estimate.ci95 == pytest.approx((0.2, 0.8))


def test_the_interval_leaves_two_and_a_half_per_cent_on_either_side():
    # Ones among 8 draws of 4 ones in 8: P(0) = 0.0039, P(<=1) = 0.0352. Among 6 of 3 in 6: P(0) = 0.0156. So a 90%
    # interval of the first would begin at 2/8, and a 98% interval of the second at 0.
    for half, end in ((4, 1 / 8), (3, 1 / 6)):
        values = np.array([[1.0, 1.0]] * half + [[0.0, 1.0]] * half)
        assert bootstrap(values, ratio_of_sums, 0, resamples=40_000).ci95 == pytest.approx((end, 1 - end))


def test_every_resample_draws_as_many_prompts_as_there_are_and_each_draw_is_new(monkeypatch):
    monkeypatch.setattr("eval.results.statistics._CHUNK_ELEMENTS", 100 * 20 * 2)
    seen = []

    def noting(columns):
        seen.append(columns[..., 0])
        return ratio_of_sums(columns)

    bootstrap(np.stack([np.arange(20.0), np.ones(20)], 1), noting, 0, resamples=250)
    *drawn, whole = seen
    assert (whole == np.arange(20)).all()
    assert [part.shape for part in drawn] == [(100, 20), (100, 20), (50, 20)]
    rows = [tuple(row) for part in drawn for row in part]
    assert len(set(rows)) == 250
    found = np.mean([len(set(row)) / 20 for row in rows])
    assert found == pytest.approx(1 - 0.95**20, abs=0.01)  # they are put back: about 64% of the prompts are in one


def test_columns_too_large_for_a_chunk_are_drawn_one_resample_at_a_time(monkeypatch):
    monkeypatch.setattr("eval.results.statistics._CHUNK_ELEMENTS", 1)
    sizes = []
    bootstrap(np.ones((3, 2)), lambda columns: sizes.append(len(columns)) or ratio_of_sums(columns), 0, resamples=4)
    assert sizes == [1, 1, 1, 1, 1]  # the last one is the value itself


def test_there_are_as_many_resamples_as_the_reports_say():
    sizes = []

    def noting(columns):
        sizes.append(len(columns))
        return ratio_of_sums(columns)

    bootstrap(np.ones((3, 2)), noting, 0)
    assert f"{sum(sizes) - 1:,} resamples" in DEFINITIONS["ci95"]
    sizes.clear()
    bootstrap_crossed(np.ones((2, 2, 2)), noting, 0)
    assert f"{sum(sizes) - 1:,} resamples" in OF_FAMILIES["tau_ci95"]


def test_trainings_and_prompts_are_each_resampled_and_prompts_are_shared_by_the_trainings():
    ones = np.ones((3, 3))
    of_prompts, of_trainings = np.stack([ones * [0, 1, 1], ones], -1), np.stack([ones * [[0], [1], [1]], ones], -1)
    for columns in (of_prompts, of_trainings):
        # All three draws fall on the zero in 1 of 27 resamples, more than 2.5% and less than 5%; drawn anew for every
        # training it would be 1 of 19,683.
        assert bootstrap_crossed(columns, ratio_of_sums, 0) == Estimate(2 / 3, (0.0, 1.0))


def test_one_training_or_one_prompt_still_has_the_others_interval():
    columns = np.array([[[0.0, 1.0], [1.0, 1.0]]])
    assert bootstrap_crossed(columns, ratio_of_sums, 0).ci95 == (0.0, 1.0)
    assert bootstrap_crossed(columns.swapaxes(0, 1), ratio_of_sums, 0).ci95 == (0.0, 1.0)
    assert bootstrap_crossed(columns[:, :1], ratio_of_sums, 0) == Estimate(0.0, None)


def test_a_ratio_of_ratios_is_of_the_first_two_sums_over_the_other_two():
    assert ratio_of_ratios(np.array([[[6.0, 1.0, 1.0, 3.0], [2.0, 3.0, 3.0, 5.0]]])) == pytest.approx([2 / 0.5])


def test_bootstrap_of_equal_prompts_has_no_width():
    estimate = bootstrap(np.full((7, 2), 3.0), median_of_ratios, seed=0)
    assert estimate.value == 1.0
    assert estimate.ci95 == (1.0, 1.0)


def test_pairing_removes_what_prompts_share():
    rng = np.random.default_rng(0)
    difficulty = rng.uniform(1, 10, size=40)
    paired = bootstrap(np.stack([2 * difficulty, difficulty], axis=1), median_of_ratios, seed=0)
    assert paired.ci95 == (2.0, 2.0)


def test_median_of_ratios_ignores_one_disturbed_prompt():
    columns = np.array([[2.0, 1.0], [2.2, 1.0], [1.8, 1.0], [200.0, 1.0], [2.1, 1.0]])
    assert bootstrap(columns, median_of_ratios, seed=0).value == pytest.approx(2.1)


def test_bootstrap_depends_on_the_seed_alone():
    columns = np.random.default_rng(3).uniform(1, 2, size=(9, 2))
    assert bootstrap(columns, ratio_of_sums, seed=5) == bootstrap(columns, ratio_of_sums, seed=5)
    assert bootstrap(columns, ratio_of_sums, seed=5) != bootstrap(columns, ratio_of_sums, seed=6)


def test_a_single_prompt_has_no_interval():
    estimate = bootstrap(np.array([[3.0, 2.0]]), ratio_of_sums, seed=0)
    assert (estimate.value, estimate.ci95, estimate.interval) == (1.5, None, None)


def test_bootstrap_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no prompts"):
        bootstrap(np.empty((0, 2)), ratio_of_sums, seed=0)


def test_a_burst_is_one_arrival():
    arrivals = [0.10, 0.15, 0.25]  # three target passes, however many tokens each brought
    assert inter_arrivals(arrivals) == pytest.approx([0.05, 0.10])
    assert inter_arrivals([0.1]) == []


def test_quantiles_of_nothing_are_none():
    assert quantiles([]) == {"p50": None, "p95": None}
    assert quantiles([1.0, 3.0])["p50"] == 2.0


def test_quantiles_are_interpolated_between_what_was_observed():
    assert quantiles([float(i) for i in reversed(range(22))]) == {"p50": 10.5, "p95": pytest.approx(19.95)}


def test_what_json_cannot_hold_is_none():
    assert [finite(value) for value in (1.5, 0.0, float("nan"), float("inf"), None)] == [1.5, 0.0, None, None, None]


def test_repeated_4grams_are_counted_from_their_second_occurrence():
    assert repeated_4grams([1, 2, 3, 4, 5, 6]) == (0, 3)
    assert repeated_4grams([1, 2, 3, 4, 1, 2, 3, 4]) == (1, 5)
    assert repeated_4grams([1, 2, 3, 4, 1, 2, 3, 5]) == (0, 5)  # three in a row are no repetition
    assert repeated_4grams([7] * 10) == (6, 7)
    assert repeated_4grams([1, 2, 3]) == (0, 0)


def test_share_of_nothing_is_none():
    assert share(0, 0) is None
    assert share(1, 4) == 0.25
