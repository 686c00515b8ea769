"""Faults of naming faults: rounds that begin elsewhere, tokens that count behind refused ones, prompts put together."""

from __future__ import annotations

from tests.eval.served import test_counting
from tests.faults import Fault, noticed_by

_IN = "eval.modes.served.faults"
FAULTS: list[Fault] = [
    *noticed_by(
        test_counting.test_a_token_counts_only_where_those_before_it_are_right,
        ("train.check.agreement:accepted", "cumprod(0)", "clone()"),
        ("train.check.agreement:accepted", "places + 1 + step", "places + step"),
    ),
    *noticed_by(
        test_counting.test_a_round_begins_behind_the_targets_own_token,
        ("train.check.agreement:rounds_of", "right[place] + 1", "max(right[place], 1)"),
    ),
    *noticed_by(
        test_counting.test_rounds_begin_behind_the_first_new_token_and_before_the_limit,
        (f"{_IN}.counting:count", "length + texts.limit - 1", "length + texts.limit"),
        (f"{_IN}.counting:count", "torch.arange(length,", "torch.arange(length - 1,"),
    ),
    *noticed_by(
        test_counting.test_counters_are_compared_prompt_by_prompt,
        (f"{_IN}.faults:distance", "(first.drafts, *first.accepted)", "(0, *first.accepted)"),
        (f"{_IN}.faults:distance", "abs(a - b)", "max(0, a - b)"),
    ),
    *noticed_by(
        test_counting.test_shares_are_alike_as_far_as_chance_goes,
        (f"{_IN}.faults:_same_share", "1 / one[1] + 1 / other[1]", "1.0"),
        (f"{_IN}.faults:_same_share", "3 * spread", "0 * spread"),
    ),
]
