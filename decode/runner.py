"""What runs passes over a slot cache: how many slots a pass looks at, and captures of passes that come again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from decode.cache import SlotCache
from decode.capture import Packed, Pass, capture

BUCKET = 256  # slots: capacities and views are rounded up, so that calls of similar length share captures
CAPTURE_AFTER = 6  # uses of one shape: a capture costs about as much as that many passes
MOST_CAPTURES = 64  # of one runner, the oldest given up first: settings of the draws are part of a capture
PREFILL_CHUNK = 512  # tokens a pass: bounds the (T, S) mask and the activations of a long prompt
SAMPLE = 64  # values of a tensor that are looked at to notice silent writes: 1 ms a call for a 28M model
MOST_RUNNERS = 6  # caches kept for one model, so that batches of a few sizes can take turns


class Runner:
    """A slot cache with the captures of the passes over it."""

    def __init__(self, cache: SlotCache, device: torch.device, packing: Packed) -> None:
        self.cache, self.device, self.packing = cache, device, packing
        self._passes: dict[tuple[object, ...], Pass] = {}
        self._uses: dict[tuple[object, ...], int] = {}
        self.replayed = False
        """Whether the last pass was the replay of a capture, so that its time tells of later ones."""

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
        self.replayed = key in self._passes
        if key not in self._passes:
            self._uses[key] = self._uses.get(key, 0) + 1
            if not at_once and self._uses[key] < CAPTURE_AFTER:
                return make()(*inputs)
            self._passes[key] = capture(make(), inputs, moved(), self.packing)
            if len(self._passes) > MOST_CAPTURES:
                oldest = next(iter(self._passes))
                del self._passes[oldest], self._uses[oldest]
        return self._passes[key](*inputs)


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


class Runners:
    """The runners of one model, the least used one given up first; kept on the model, so that they end with it (a table
    elsewhere would hold the model for ever, since they refer to it)."""

    def __init__(self, state: int, packing: Packed) -> None:
        """`state` is the `weights_state` of what the runners are captures of."""
        self.state, self.packing = state, packing
        self._kept: dict[tuple[object, ...], Runner] = {}

    @classmethod
    def of(cls, module: nn.Module, packing: Callable[[], Packed], *others: nn.Module) -> Runners:
        """Those of `module`, begun anew when it or one of the `others` in its passes has changed: packed weights are
        copies, which training makes stale."""
        state = hash(tuple(weights_state(one) for one in (module, *others)))
        kept = vars(module).get("_draftsmith_runners")
        if kept is None or kept.state != state:
            kept = vars(module)["_draftsmith_runners"] = cls(state, packing())
        return kept

    def get(self, key: tuple[object, ...], make: Callable[[Packed], Runner]) -> Runner:
        """The runner of this key."""
        runner = self._kept.pop(key, None) or make(self.packing)
        self._kept[key] = runner
        if len(self._kept) > MOST_RUNNERS:
            del self._kept[next(iter(self._kept))]
        return runner

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or pickled model makes its own."""
        return type(None), ()


def weights_state(model: nn.Module) -> int:
    """Changes when a parameter or buffer is replaced, moved or written to, and when a module is exchanged, hooked or
    set otherwise (train mode, an adapter switched on): a capture would not notice.

    Writes that bypass torch's version counter (`.data`, inference mode) show in a sample of the values on a CPU, where
    packed weights are copies.
    """
    tensors = (tensor_state(one) for one in (*model.parameters(), *model.buffers()))
    return hash((*tensors, *(_module_state(module) for module in model.modules())))


def tensor_state(tensor: Tensor) -> tuple[object, ...]:
    """Changes when the tensor is replaced, moved or written to."""
    version = 0 if tensor.is_inference() else tensor._version
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return tensor.data_ptr(), tensor.dtype, version
    sample = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLE)]
    return tensor.data_ptr(), tensor.dtype, version, float(sample.double().sum())


def _module_state(module: nn.Module) -> tuple[object, ...]:
    plain = (value for value in vars(module).values() if isinstance(value, bool | int | float | str))
    return id(module), len(module._forward_hooks), len(module._forward_pre_hooks), *plain


def rounded(capacity: int) -> int:
    """Slots of a cache that holds `capacity` tokens."""
    return -(-capacity // BUCKET) * BUCKET
