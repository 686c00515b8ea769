"""Rounds that the device was given and the host has not read yet, and what is known of the rows meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.rounds.rows import Rows


class Reading:
    """A copy of a tensor to the host that is under way; the device goes on meanwhile."""

    def __init__(self, values: Tensor) -> None:
        self._copy, self._done = values, None
        if values.is_cuda:
            self._copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._copy.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(values.device))

    def values(self) -> list[list[Any]]:
        """Wait for it."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()


@dataclass(frozen=True)
class Flight:
    """A round that was launched."""

    reading: Reading
    """Of its report (`round.Outcome`)."""
    distance: Reading | None
    """(B, D + 1) as in the outcome, of rules that measure it."""
    seated: list[int]
    """The requests in the rows, as it was launched."""
    depth: int
    """Most draft tokens that a row can have accepted."""
    began: float
    """Seconds on the clock of `time.perf_counter`."""
    replayed: bool
    """Whether it was a captured unit, so that its time tells of later ones."""
    ahead: bool | None
    """Whether its drafts were made during the round before; None where none ever are, and without drafts."""


class Bounds(NamedTuple):
    """What the host knows of the rows without asking the device."""

    shortest: int
    """No running row has fewer committed tokens."""
    longest: int
    """No row has as many: one more than the most, so that a captured round can be tried a token further on."""
    left: int
    """No running row can emit more."""


def bounds_of(rows: Rows, flights: Iterable[Flight]) -> Bounds:
    """Every round in flight adds at least one token to a running row, and at most its draft and one more."""
    lengths, running = rows.lengths, rows.running
    least, most = list(lengths), list(lengths)
    for flight in flights:
        for row in running:
            if flight.seated[row] == rows.seated[row]:
                least[row] += 1
                most[row] = min(most[row] + flight.depth + 1, rows.at(row).end)
    left = max((rows.at(row).end - least[row] for row in running), default=0)
    return Bounds(min((least[row] for row in running), default=1), max(most) + 1, left)
