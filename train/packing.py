"""Which sequences lie in which row, and which rows a step reads: pure functions of lengths, seed and step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Row = tuple[int, ...]
"""Indices of the sequences that one packed row holds, in order."""


def pack(lengths: Sequence[int], capacity: int, seed: int) -> list[Row]:
    """Rows of at most `capacity` tokens that hold every sequence once (best fit, longest first; ties in seeded order).

    A sequence longer than `capacity` is our own mistake: sources cut their sequences to it.
    """
    shuffled = np.random.default_rng((seed, 0)).permutation(len(lengths))
    by_length = sorted(shuffled.tolist(), key=lambda index: -lengths[index])
    rows: list[list[int]] = []
    by_free: dict[int, list[int]] = defaultdict(list)  # free tokens -> open rows with so many
    sizes = 0  # bit n is set where a row with n free tokens is open: the least fitting one is the lowest bit from there
    for index in by_length:
        length = int(lengths[index])
        assert length <= capacity, (index, length, capacity)
        fitting = sizes >> length << length
        if fitting:
            free = (fitting & -fitting).bit_length() - 1
            row = by_free[free].pop()
            sizes ^= 0 if by_free[free] else 1 << free
        else:
            free, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if free > length:
            by_free[free - length].append(row)
            sizes |= 1 << free - length
    return [tuple(row) for row in rows]


@dataclass(frozen=True)
class Order:
    """The rows that every step reads, the same for any split of them over ranks and micro-steps.

    Each epoch reads all rows once, in an order drawn from (seed, epoch).
    """

    num_rows: int
    rows_per_step: int
    seed: int

    def rows_of_step(self, step: int) -> list[int]:
        """Row numbers of step `step` (from 0), all ranks and micro-steps together."""
        first = step * self.rows_per_step
        return [self._row(place) for place in range(first, first + self.rows_per_step)]

    def _row(self, place: int) -> int:
        epoch, offset = divmod(place, self.num_rows)
        return int(_epoch_order(self.num_rows, self.seed, epoch)[offset])


def share(rows: list[int], rank: int, micro_step: int, batch_size: int, world_size: int) -> list[int]:
    """The rows of one rank's micro-step: disjoint between ranks and micro-steps, together all of `rows`."""
    first = (micro_step * world_size + rank) * batch_size
    return rows[first : first + batch_size]


@lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, 1, epoch)).permutation(num_rows)
