"""What runs passes over a slot cache: how many slots a pass looks at, and captures of passes that come again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from decode.common.progress import get_logger
from decode.forward.cache import SlotCache
from decode.forward.capture import Pass, Uncapturable, capture
from decode.forward.packed_linear import Packed

log = get_logger("decode")

BUCKET = 256  # slots: capacities and views are rounded up, so that calls of similar length share captures
CAPTURE_AFTER = 6  # uses of one shape: a capture costs about as much as that many passes
MOST_CAPTURES = 64  # of one runner, the oldest given up first: settings of the draws are part of a capture
PREFILL_CHUNK = 512  # tokens a pass: bounds the (T, S) mask and the activations of a long prompt

PASSES = threading.RLock()
"""Held while a pass runs: it puts hooks, packed layers and an attention of its own on the model, which a pass of
another thread would meet."""


class Runner:
    """A slot cache with the captures of the passes over it."""

    def __init__(self, cache: SlotCache, device: torch.device, packing: Packed) -> None:
        self.cache, self.device, self.packing = cache, device, packing
        self._passes: dict[tuple[object, ...], Pass] = {}
        self._uses: dict[tuple[object, ...], int] = {}
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.told: set[str] = set()
        """Why passes are not captured, each reason once."""
        self.replayed = False
        """Whether the last pass was the replay of a capture, so that its time tells of later ones."""

    @property
    def num_bytes(self) -> int:
        """Of its cache and, on a CPU, its captures; the memory of a GPU's captures is not known."""
        return self.cache.num_bytes + sum(getattr(one, "num_bytes", 0) for one in self._passes.values())

    def visible(self, end: int) -> int:
        """Slots that a pass looks at whose last node lies before slot `end`: doubled from one bucket to the next."""
        size = BUCKET
        while size < end:
            size *= 2
        return min(size, self.cache.capacity)

    def run(
        self,
        key: tuple[object, ...],
        make: Callable[[], nn.Module],
        inputs: tuple[Tensor, ...],
        moved: Callable[[], tuple[Tensor, ...]],
        at_once: bool = False,
    ) -> tuple[Tensor, ...]:
        """The module that `make` makes, at `inputs`, by its capture once `key` has been used often enough, or at once.

        `moved()` are the inputs of the same pass over a later slot (see `capture.capture`): a check there writes only
        where nothing is committed.
        """
        with PASSES:
            self.replayed = key in self._passes
            if key not in self._passes:
                self._uses[key] = self._uses.get(key, 0) + 1
                if not at_once and self._uses[key] < CAPTURE_AFTER:
                    return make()(*inputs)
                self._passes[key] = self._captured(make(), inputs, moved())
                if len(self._passes) > MOST_CAPTURES:
                    oldest = next(iter(self._passes))
                    del self._passes[oldest], self._uses[oldest]
            return self._passes[key](*inputs)

    def _captured(self, module: nn.Module, inputs: tuple[Tensor, ...], moved: tuple[Tensor, ...]) -> Pass:
        try:
            return capture(module, inputs, moved, self.packing, self._pool)
        except Uncapturable as error:
            self._tell(str(error))
            return module
        except torch.OutOfMemoryError:
            pass  # the error holds on to memory
        torch.cuda.empty_cache()
        self._tell("memory does not suffice for captures; decode fewer requests at once, or shorter ones")
        return module

    def _tell(self, why: str) -> None:
        if why not in self.told:
            self.told.add(why)
            log.warning("passes run uncaptured, which is slower: %s", why)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or pickled drafter makes its own."""
        return type(None), ()


def chunks(begin: list[int], end: list[int]) -> Iterator[tuple[list[int], int, int]]:
    """(rows, start, stop) of the passes that read tokens begin[b] ... end[b] - 1 of each row: rows that begin at the
    same token are read together, a shorter one beside a longer one to the longer one's end."""
    groups: dict[int, list[int]] = {}
    for row, first in enumerate(begin):
        if end[row] > first:
            groups.setdefault(first, []).append(row)
    for first, rows in groups.items():
        last = max(end[row] for row in rows)
        for start in range(first, last, PREFILL_CHUNK):
            yield rows, start, min(start + PREFILL_CHUNK, last)


def rounded(capacity: int) -> int:
    """Slots of a cache that holds `capacity` tokens."""
    return -(-capacity // BUCKET) * BUCKET
