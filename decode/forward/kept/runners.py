"""The runners of a model, kept from one call to the next, and which are given up."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from decode.common.environment import memory_bytes
from decode.forward.kept.lease import Lease
from decode.forward.kept.weights_state import weights_state
from decode.forward.packed_linear import Packed
from decode.forward.passes import holding
from decode.forward.runner import Runner

MOST_RUNNERS = 8  # of one model, so that batches of a few sizes can take turns
SHARE = 1 / 8
"""Of the device's memory, for the runners of one model. It was a GiB on CPUs, which the captures of a comparison of
twelve settings passed: each call then gave up what the next one needed."""
R = TypeVar("R", bound=Runner)


class Runners:
    """The runners of one model, the least used one given up first; kept on the model, so that they end with it (a table
    elsewhere would hold the model for ever, since they refer to it)."""

    def __init__(self, state: int, packing: Packed) -> None:
        """`state` is the `weights_state` of what the runners are captures of."""
        self.state, self.packing = state, packing
        self.told: set[str] = set()
        self._kept: dict[tuple[object, ...], Runner] = {}

    @classmethod
    def of(cls, module: nn.Module, packing: Callable[[], Packed], *others: nn.Module) -> Runners:
        """Those of `module`, begun anew when it or one of the `others` in its passes has changed: packed weights are
        copies, which training makes stale."""
        with holding(module, *others):  # a pass hooks the model while it runs
            device = next(module.parameters()).device.type
            cast_to = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            state = hash((cast_to, *(weights_state(one) for one in (module, *others))))
            kept = vars(module).get("_draftsmith_runners")
            if kept is None or kept.state != state:
                kept = vars(module)["_draftsmith_runners"] = cls(state, packing())
            return kept

    def get(self, key: tuple[object, ...], make: Callable[[Packed], R], lease: Lease) -> R:
        """A runner of this key that no other lease holds; idle ones are given up where memory ends."""
        with holding(*self.packing.models):
            place, runner = self._free(key, lease)
            if runner is None:
                runner = self._made(make)
                runner.told = self.told
                lease.take(runner)
            else:
                runner.cache.clear()
            self._kept[place] = runner
            self._give_up(most_bytes(runner.device))
            return runner  # type: ignore[return-value]

    def _made(self, make: Callable[[Packed], R]) -> R:
        try:
            return make(self.packing)
        except torch.OutOfMemoryError:
            pass  # the error holds on to what could be allocated, so it has to be gone
        self._kept.clear()
        gc.collect()  # a captured round and the runner that keeps it refer to one another
        torch.cuda.empty_cache()
        return make(self.packing)

    def _free(self, key: tuple[object, ...], lease: Lease) -> tuple[tuple[object, ...], Runner | None]:
        for number in itertools.count():
            runner = self._kept.get((*key, number))
            if runner is None or lease.take(runner):
                return (*key, number), self._kept.pop((*key, number), None)
        raise AssertionError("counting ends")

    def _give_up(self, most: int) -> None:
        """The oldest ones, until the others fit; the newest stays, whatever its size."""
        kept = self._kept
        while len(kept) > MOST_RUNNERS or (len(kept) > 1 and sum(one.num_bytes for one in kept.values()) > most):
            del kept[next(iter(kept))]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or pickled model makes its own."""
        return type(None), ()


def most_bytes(device: torch.device) -> int:
    """What the runners of one model may hold together."""
    is_gpu = device.type == "cuda"
    return int(SHARE * (torch.cuda.get_device_properties(device).total_memory if is_gpu else memory_bytes()))
