"""Keys and values of layers of one shape in one buffer, laid out for as many slots as passes look at.

What a pass reads then lies together, without gaps for slots that nobody has reached: of 256 slots of which 96 were
looked at, 16 rows took 3.2 ms a pass as a view with gaps and 2.0 ms without (8 layers, sdpa, one core), and a product
of oneDNN, which copies what has gaps, 9.9 against 4.4 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_BUCKET = 64
"""Slots that a pass looks at where it needs no more, and more are not `cheap_slots`."""


def bucket(end: int) -> int:
    """The slots that are laid out where `end` are needed: two sizes a doubling. Each is a capture of its own, which
    takes as long as some dozens of tokens; finer steps of 32 spared 4 % of a pass over 16 rows at most."""
    size = FIRST_BUCKET
    while size < end:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


CHEAP = 1 / 16
"""Of the weights: slots of so many bytes cost a pass nothing that is measured (135M parameters, one row: 64 slots and
768 take 52 ms each), and every size less is a capture less, of 3 seconds there."""
MOST_CHEAP = 1024
"""Of all rows together: scores cost as well, by the row and by the query."""


def cheap_slots(weight_bytes: int, slot_bytes: int, rows: int) -> int:
    """The slots that a pass may look at for nothing, where all `rows` have `slot_bytes` in one: at least the first
    bucket."""
    size = FIRST_BUCKET
    while bucket(size + 1) <= min(MOST_CHEAP // rows, CHEAP * weight_bytes / max(1, slot_bytes)):
        size = bucket(size + 1)
    return size


@dataclass(frozen=True)
class Shape:
    """Of keys or values of one layer."""

    rows: int
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device


class SlotStack:
    """n parts, keys or values of a layer each, of B rows of up to `capacity` slots."""

    def __init__(self, count: int, shape: Shape, capacity: int) -> None:
        self._count, self._shape = count, shape
        length = count * shape.rows * shape.heads * capacity * shape.size
        self._buffer = torch.empty(length, dtype=shape.dtype, device=shape.device)
        self.view = self._laid_out(0)
        """(n, B, heads, slots, d) of the slots that are laid out."""

    @property
    def num_bytes(self) -> int:
        """Of all `capacity` slots."""
        return self._buffer.nbytes

    def lay_out(self, slots: int) -> None:
        """Keep the first slots at their new places, the rest being zeros: a masked NaN still poisons a sum (0 * NaN).

        Part by part, the last one first where they move apart, so that none is written over before it has moved.
        """
        old, new = self.view, self._laid_out(slots)
        kept = min(slots, old.shape[-2])
        for part in range(self._count) if slots < old.shape[-2] else reversed(range(self._count)):
            held = old[part, :, :, :kept].clone()
            new[part, :, :, :kept] = held
            new[part, :, :, kept:] = 0
        self.view = new

    def _laid_out(self, slots: int) -> Tensor:
        shape = (self._count, self._shape.rows, self._shape.heads, slots, self._shape.size)
        return self._buffer[: torch.Size(shape).numel()].view(shape)
