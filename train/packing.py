"""Which sequences lie in which row, and which rows a step reads: pure functions of lengths, seed and step."""

from __future__ import annotations

import bisect
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
    open_rows: dict[int, list[int]] = {}  # free tokens -> rows with so many
    free_sizes: list[int] = []  # the keys of open_rows, sorted
    for index in by_length:
        length = int(lengths[index])
        assert length <= capacity, (index, length, capacity)
        row, free = _best_fit(open_rows, free_sizes, length) or (len(rows), capacity)
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        _put_back(open_rows, free_sizes, row, free - length)
    return [tuple(row) for row in rows]


def _best_fit(open_rows: dict[int, list[int]], free_sizes: list[int], length: int) -> tuple[int, int] | None:
    place = bisect.bisect_left(free_sizes, length)
    if place == len(free_sizes):
        return None
    free = free_sizes[place]
    row = open_rows[free].pop()
    if not open_rows[free]:
        del open_rows[free], free_sizes[place]
    return row, free


def _put_back(open_rows: dict[int, list[int]], free_sizes: list[int], row: int, free: int) -> None:
    if free == 0:
        return
    if free not in open_rows:
        open_rows[free] = []
        bisect.insort(free_sizes, free)
    open_rows[free].append(row)


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
