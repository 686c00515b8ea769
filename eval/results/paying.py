"""Why a draft does not pay: what each draft length would give by its acceptance and component times, and how cheap a
drafted token would have to be."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, takewhile
from operator import mul
from typing import Any

from decode.acceptance import predicted_speedup

Row = Mapping[str, Any]


def taus(row: Row) -> dict[int, float]:
    """k -> tokens per target pass that the measured acceptance by position promises, up to the length that was run."""
    known = takewhile(lambda share: share is not None, row["acceptance_by_position"])
    reached = accumulate(known, mul)  # that all of the first k are accepted
    return {k: 1 + total for k, total in enumerate(accumulate(reached), start=1)}


def verification(row: Row, k: int) -> float:
    """t_target(k + 1) in target passes over one token, in a straight line between the two sizes that were timed."""
    times = row["component_times"]
    slope = (times["t_target_k1_s"] / times["t_target_1_s"] - 1) / times["num_draft_tokens"]
    return 1 + slope * k


def draft_cost(row: Row) -> float:
    """A drafted token in target passes over one token."""
    return row["component_times"]["t_draft_s"] / row["component_times"]["t_target_1_s"]


def predicted_by_length(row: Row) -> dict[int, float]:
    """k -> predicted speedup."""
    cost = draft_cost(row)
    return {k: predicted_speedup(tau, k, 1.0, cost, verification(row, k)) for k, tau in taus(row).items()}


def dearest_draft(row: Row) -> float:
    """What a drafted token may cost, in target passes, for some k to pay: tau(k) > k * cost + t(k + 1) solved for it.
    Not above 0 where checking alone costs more than the draft wins."""
    return max((tau - verification(row, k)) / k for k, tau in taus(row).items())
