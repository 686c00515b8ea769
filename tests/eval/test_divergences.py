"""Where a divergence lies, what it leaves out, and how near a near-tie is."""

from __future__ import annotations

import pytest

from eval.measure.continuations import Job, Text
from eval.measure.losslessness import Check, Divergence, check, divergences, flips, judge

TEXT = Text(3, (1, 2), (10, 11, 12))


@pytest.mark.parametrize(
    ("gap", "expected"),
    [(0.00009, Check(near_ties=1)), (0.0001, Check(near_ties=1)), (0.00011, Check(mismatches=1))],
)
def test_a_near_tie_lies_within_a_ten_thousandth_of_the_best_score(gap: float, expected: Check) -> None:
    assert judge(Divergence(TEXT, 1, (99,)), lambda *_: gap) == expected


def test_the_two_tokens_of_a_divergence_are_those_that_are_judged() -> None:
    asked = []
    judge(Divergence(TEXT, 1, (99, 98)), lambda *given: asked.append(given) or 0.0)
    assert asked == [(TEXT, 1, 99)]


@pytest.mark.parametrize(("at", "rest"), [(1, ()), (3, (99,))])
def test_a_text_that_is_over_where_the_other_goes_on_is_a_mismatch_whatever_the_margin(
    at: int, rest: tuple[int, ...]
) -> None:
    assert judge(Divergence(TEXT, at, rest), lambda *_: 0.0) == Check(mismatches=1)


def test_what_follows_a_divergence_is_left_out_down_to_nothing() -> None:
    assert [Divergence(TEXT, at, (99,)).left_out for at in (0, 1, 2, 3)] == [2, 1, 0, 0]


def test_divergences_are_found_one_after_another_each_behind_the_references_own_prefix() -> None:
    jobs: list[list[Job]] = []
    answers = iter([(99, 11, 12), (11, 98)])

    def speculate(asked: list[Job]) -> list[Text]:
        jobs.append(asked)
        return [Text(3, asked[0].prompt, next(answers))]

    found = list(divergences([TEXT, Text(4, (5,), ())], speculate))  # type: ignore[arg-type]
    assert found == [Divergence(TEXT, 0, (99, 11, 12)), Divergence(TEXT, 2, (98,))]
    assert jobs == [[Job(3, (1, 2), 3)], [Job(3, (1, 2, 10), 2)]]  # the empty text is not asked for


def test_a_divergence_at_the_last_token_leaves_nothing_to_go_on_with() -> None:
    calls = []

    def speculate(asked: list[Job]) -> list[Text]:
        calls.append(asked)
        return [Text(3, (1, 2), (10, 11, 99))]

    for resumes in (True, False):
        counted = check([TEXT], speculate, lambda *_: 1.0, resumes)  # type: ignore[arg-type]
        assert counted == [Check(mismatches=1, tokens=3)]
    assert len(calls) == 2


def test_flips_add_up_over_sequences_and_count_tokens_up_to_each() -> None:
    alone, drafted = [[1, 2, 3], [4, 5, 6], [7, 8], [9]], [[1, 2, 3], [0, 5, 6], [7, 0], [9]]
    assert flips(alone, drafted) == Check(near_ties=2, tokens=3 + 1 + 2 + 1)
