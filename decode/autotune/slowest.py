"""What a round is worth to a batch that nobody waits for: it ends with its slowest row.

Tokens of all rows together say little of that. Of four rows two may accept everything and two nothing: a deep draft
then makes the most tokens a second, and the rows that accept nothing, which end last, pay for it in every round.
Simulated with rows as different as greedy texts are, the depth of most tokens ends batches at less than 0.9 of plain
speed, this rule at 0.95 or more (tests/decode/test_slowest.py).

A row's acceptance is that of all rows times a factor of its own, Gamma distributed before anything is known of it. The
time to the batch's end is averaged over draws of these factors, since the least of several rows is below what each of
them may be expected to have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decode.autotune.estimates import FORGET
from decode.stats import Round

ROW_WEIGHT = 4.0
"""Accepted tokens that outweigh, for a row, what all rows accept."""
DRAWS = 32


@dataclass
class _Row:
    taken: float = 0.0
    """Draft tokens accepted, the older the less they count."""
    promised: float = 0.0
    """As many as were expected of any row."""


class SlowestRow:
    """How the rows of a call differ, and when the last of them will end."""

    def __init__(self) -> None:
        self._left: Mapping[int, int] = {}
        self._several = False
        self._rows: dict[int, _Row] = {}
        self._normal = np.empty((DRAWS, 0))

    @property
    def decides(self) -> bool:
        """Whether several rows run, or ran before all but one had ended, and no request waits for one of them."""
        return bool(self._left) and self._several

    def running(self, left: Mapping[int, int]) -> None:
        """Request -> tokens that it can still emit, of all that run; empty where others wait for their rows."""
        self._left = left
        self._several = self._several or len(left) > 1
        if len(left) > self._normal.shape[1]:
            self._normal = np.random.default_rng(0).standard_normal((DRAWS, len(left)))

    def learn(self, rounds: Sequence[Round], chances: Sequence[float]) -> None:
        """Count one round; `chances` are those of all rows together by position, given that those before were
        accepted."""
        for one in rounds:
            row = self._rows.setdefault(one.row, _Row())
            row.taken = FORGET * row.taken + one.accepted
            row.promised = FORGET * row.promised + sum(chances[: min(one.drafted, one.accepted + 1)])

    def expected(self, chances: Sequence[float]) -> list[float]:
        """By depth 0, 1, ..., the tokens a round with which the row with most tokens left would end when the batch
        does: 1 for depth 0."""
        rounds_needed = (self._shares() / _tokens(self._drawn(), chances)).max(1)
        return (1 / rounds_needed.mean(0)).tolist()

    def emitted(self, rounds: Sequence[Round], drafted: int, chances: Sequence[float]) -> float:
        """Tokens that a round of all rows, which is yet to be learned, brought the row that was to end last."""
        taken, promised = self._counts()
        rounds_needed = (self._shares() / _tokens(taken / promised, chances))[:, drafted]
        slowest = list(self._left)[int(rounds_needed.argmax())]
        return next((float(one.emitted) for one in rounds if one.row == slowest), 1.0)

    def _counts(self) -> NDArray[np.float64]:
        """(2, rows): shape and rate of the Gamma distribution of each row's factor."""
        rows = [self._rows.get(one, _Row()) for one in self._left]
        return np.array([[row.taken for row in rows], [row.promised for row in rows]]) + ROW_WEIGHT

    def _drawn(self) -> NDArray[np.float64]:
        """(draws, rows): the same draws in every round, by the cube of a normal number (Wilson and Hilferty 1931)."""
        shape, rate = self._counts()
        normal = self._normal[:, : len(shape)]
        return shape * np.maximum(0.0, 1 - 1 / (9 * shape) + normal / (3 * np.sqrt(shape))) ** 3 / rate

    def _shares(self) -> NDArray[np.float64]:
        """(rows, 1): tokens left, in shares of the most."""
        left = np.array(list(self._left.values()), dtype=float)
        return (left / left.max())[:, None]


def _tokens(factors: NDArray[np.float64], chances: Sequence[float]) -> NDArray[np.float64]:
    """(..., rows) -> (..., rows, depths): E(k) of each row."""
    reach = np.minimum(1.0, factors[..., None] * np.array(chances)).cumprod(-1)
    return np.concatenate([np.ones((*factors.shape, 1)), 1 + reach.cumsum(-1)], axis=-1)
