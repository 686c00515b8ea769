"""Draft lengths from speeds: exact schedules of speeds that are written down here. And the keys of vLLM, which itself
reads them in tests/engines/test_schedule.py."""

import math

import pytest

from eval.modes.served.schedule.in_vllm import held_at, lengths
from eval.modes.served.schedule.schedule import Choice, Ratio, Speed, choices, one_length, per_batch_size, ratio

EVEN = Ratio(1.0, (1.0, 1.0))


def measured(table: dict[int, dict[int, tuple[float, ...]]]) -> list[Speed]:
    """Batch size -> k -> tokens/s by round."""
    return [Speed(size, k, speeds) for size, lengths in table.items() for k, speeds in lengths.items()]


def best(table: dict[int, dict[int, tuple[float, ...]]]) -> list[Choice]:
    """Of such a table, whose k = 0 is the target alone."""
    return choices(measured(table), [one for one in measured(table) if not one.k])


def chosen(table: dict[int, dict[int, tuple[float, ...]]]) -> dict[int, int]:
    """Batch size -> k."""
    return {one.batch_size: one.k for one in best(table)}


def of_lengths(lengths: dict[int, int]) -> list[Choice]:
    """Batch size -> k, chosen somehow."""
    return [Choice(size, k, EVEN, k, EVEN) for size, k in lengths.items()]


def test_the_example_of_the_file() -> None:
    table = {
        1: {0: (100.0, 102.0), 2: (150.0, 151.0), 4: (180.0, 184.0)},
        8: {0: (400.0, 398.0), 2: (420.0, 380.0), 4: (300.0, 310.0)},
    }
    assert chosen(table) == {1: 4, 8: 0}
    assert per_batch_size(best(table)) == [(1, 1, 4), (2, 8, 0)]


def test_a_longer_draft_has_to_be_faster_beyond_the_error_bar() -> None:
    # Logs of +0.10 and +0.20 have mean 0.15 and a standard error of 0.05: t with 1 degree of freedom asks for 0.635.
    unsure = {0: (100.0, 100.0), 3: (100 * math.exp(0.10), 100 * math.exp(0.20))}
    sure = {0: (100.0, 100.0), 3: (100 * math.exp(0.150), 100 * math.exp(0.151))}
    assert chosen({1: unsure}) == {1: 0}
    assert chosen({1: sure}) == {1: 3}


def test_the_interval_is_student_s_over_rounds() -> None:
    found = ratio([math.exp(0.1), math.exp(0.2), math.exp(0.3)], [1.0, 1.0, 1.0])
    half = 4.302653 * 0.1 / math.sqrt(3)  # the 97.5% point of t with 2 degrees of freedom
    assert found.value == pytest.approx(math.exp(0.2))
    assert found.ci95 == pytest.approx((math.exp(0.2 - half), math.exp(0.2 + half)))


def test_rounds_are_paired_so_that_a_slow_hour_is_nobody_s() -> None:
    # Twice as slow in the second round, all of them: 10% faster is 10% faster.
    assert chosen({1: {0: (100.0, 50.0, 80.0), 2: (110.0, 55.1, 88.0)}}) == {1: 2}


def test_a_longer_draft_is_held_against_the_best_so_far_and_not_against_none() -> None:
    speeds = {0: (100.0, 100.0), 1: (200.0, 201.0), 2: (199.0, 201.0), 3: (150.0, 150.1)}
    assert chosen({4: speeds}) == {4: 1}


def test_a_length_may_be_passed_over() -> None:
    assert chosen({1: {0: (100.0, 100.0), 1: (95.0, 95.1), 4: (130.0, 131.0)}}) == {1: 4}


def test_over_plain_is_of_the_one_chosen_over_the_target_alone() -> None:
    # Nothing drafted with the draft loaded is slower than the target alone: the draft reads along.
    plain = [Speed(2, 0, (120.0, 120.0))]
    (choice,) = choices(measured({2: {0: (100.0, 100.0), 4: (150.0, 150.0)}}), plain)
    assert choice.over_plain.value == pytest.approx(150 / 120)
    (choice,) = choices(measured({2: {0: (100.0, 100.0), 4: (50.0, 50.0)}}), plain)
    assert (choice.k, choice.over_plain.value) == (0, pytest.approx(100 / 120))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ({1: 4}, [(1, 1, 4)]),
        ({8: 2}, [(1, 8, 2)]),
        ({1: 4, 2: 4, 4: 4}, [(1, 4, 4)]),
        ({1: 4, 4: 2, 8: 0}, [(1, 1, 4), (2, 4, 2), (5, 8, 0)]),
        ({1: 2, 4: 4}, [(1, 3, 2), (4, 4, 4)]),  # between, the shorter of the two
        ({4: 3, 1: 3, 2: 5}, [(1, 1, 3), (2, 2, 5), (3, 4, 3)]),
        ({1: 0, 2: 0}, [(1, 2, 0)]),
    ],
)
def test_ranges_are_inclusive_without_gaps_and_neighbours_are_one(
    lengths: dict[int, int], expected: list[tuple[int, int, int]]
) -> None:
    assert per_batch_size(of_lengths(lengths)) == expected


def test_one_length_for_all_batch_sizes_weighs_them_alike() -> None:
    # Twice as fast alone and a third slower at 8 at once, where ten times as many tokens come: 2 * 2/3 > 1.
    plain = measured({1: {0: (10.0, 10.0)}, 8: {0: (900.0, 900.0)}})
    found = one_length([*plain, *measured({1: {2: (20.0, 20.1)}, 8: {2: (600.0, 603.0)}})], plain)
    assert found.k == 2
    assert found.over_plain.value == pytest.approx(math.sqrt(4 / 3), rel=0.01)
    slower = [*plain, *measured({1: {2: (12.0, 12.0)}, 8: {2: (600.0, 600.1)}})]
    assert one_length(slower, plain).k == 0


def test_the_longest_draft_is_named_beside_the_ranges() -> None:
    assert lengths("eagle3", [(1, 4, 4), (5, 16, 1)]) == {
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 16, 1]],
    }


def test_one_length_for_all_needs_no_schedule_and_medusa_takes_none() -> None:
    assert lengths("medusa", [(1, 16, 3)]) == {"num_speculative_tokens": 3}
    with pytest.raises(AssertionError):
        lengths("medusa", [(1, 4, 3), (5, 16, 1)])


def test_a_server_is_held_at_a_length_as_its_schedule_would_hold_it() -> None:
    held = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 1, 0]]}
    assert held_at("draft_model", 0, 4) == held
    assert held_at("medusa", 2, 4) == {"num_speculative_tokens": 2}
