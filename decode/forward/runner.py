"""What runs passes over a slot cache: how many slots a pass looks at, captures of passes that come again, and runners
kept from one call to the next (who holds one, and which are given up)."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from decode.common.progress import get_logger
from decode.forward.cache import SlotCache
from decode.forward.capture import Pass, Uncapturable, capture
from decode.forward.packed_linear import Packed, Together
from decode.forward.slot_stack import bucket

log = get_logger("decode")

BUCKET = 256  # slots: capacities are rounded up, so that calls of similar length share captures
CAPTURE_AFTER = 6  # uses of one shape: a capture costs about as much as that many passes
MOST_CAPTURES = 64  # of one runner, the oldest given up first: settings of the draws are part of a capture
PREFILL_CHUNK = 512  # tokens a pass: bounds the (T, S) mask and the activations of a long prompt

PASSES = threading.RLock()
"""Held while a pass runs: it puts hooks, packed layers and an attention of its own on the model, which a pass of
another thread would meet."""
SAMPLE = 64  # values of a tensor that are looked at to notice silent writes: 1 ms a call for a 28M model
MOST_RUNNERS = 8  # of one model, so that batches of a few sizes can take turns
GPU_SHARE = 1 / 8  # of a GPU's memory, for the runners of one model
CPU_BYTES = 1 << 30  # the same on a CPU
T = TypeVar("T")


_serials = itertools.count()


class _Unit(threading.local):
    runs = False
    is_hurried = False


_unit = _Unit()


@contextmanager
def whole() -> Iterator[None]:
    """What runs inside is part of a larger unit, which is captured as a whole."""
    before, _unit.runs = _unit.runs, True
    try:
        yield
    finally:
        _unit.runs = before


@contextmanager
def captured_at_once() -> Iterator[None]:
    """What runs inside is captured at its first use: parts that are timed alone may be run nowhere else."""
    before, _unit.is_hurried = _unit.is_hurried, True
    try:
        yield
    finally:
        _unit.is_hurried = before


def in_unit() -> bool:
    """Whether a larger unit runs, on packed weights perhaps."""
    return _unit.runs


class Runner:
    """A slot cache with the captures of the passes over it."""

    def __init__(self, cache: SlotCache, device: torch.device, packing: Packed) -> None:
        self.cache, self.device, self.packing = cache, device, packing
        self.serial = next(_serials)
        """Names it in the keys of captures that write into its cache and are kept elsewhere."""
        self._passes: dict[tuple[object, ...], Pass | None] = {}
        self._uses: dict[tuple[object, ...], int] = {}
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.told: set[str] = set()
        """Why passes are not captured, each reason once."""
        self.unread = 0
        """Of a drafter's: committed tokens of a row, or slots, that the last round with drafts can have left unread. It
        stands here, since what stands on a drafter's module tells whether its captures are stale."""
        self.replayed = False
        """Whether the last pass was the replay of a capture, so that its time tells of later ones."""

    @property
    def num_bytes(self) -> int:
        """Of its cache and, on a CPU, its captures; the memory of a GPU's captures is not known."""
        return self.cache.num_bytes + sum(getattr(one, "num_bytes", 0) for one in self._passes.values())

    def visible(self, end: int) -> int:
        """Slots that a pass over all rows looks at whose last node lies before slot `end`: those of the cache, which is
        laid out anew where it has too few, or more than twice as many as needed since a long row has left. The parts of
        a unit keep what it began with, by which its capture is found: they may need fewer than it was given."""
        if 2 * bucket(end) <= self.cache.num_slots and not in_unit():
            self.cache.lay_out(bucket(end))
        self.cache.hold(end)
        return self.cache.num_slots

    def run(
        self,
        key: tuple[object, ...],
        make: Callable[[], nn.Module],
        inputs: tuple[Tensor, ...],
        moved: Callable[[], tuple[Tensor, ...]],
        at_once: bool = False,
        beside: Runner | None = None,
    ) -> tuple[Tensor, ...]:
        """The module that `make` makes, at `inputs`, by its capture once `key` has been used often enough, or at once.

        `moved()` are the inputs of the same pass over a later slot (see `capture.capture`): a check there writes only
        where nothing is committed. `beside` is a runner whose cache the module writes as well: its weights are packed
        too, and what was captured over it ends with it.
        """
        if in_unit():
            return make()(*inputs)
        with PASSES:
            self.replayed = key in self._passes
            if key not in self._passes:
                self._uses[key] = self._uses.get(key, 0) + 1
                if not (at_once or _unit.is_hurried) and self._uses[key] < CAPTURE_AFTER:
                    with whole():
                        return make()(*inputs)
                self._keep(key, self._captured(make(), inputs, moved(), beside), beside)
            return (self._passes[key] or make())(*inputs)

    def _keep(self, key: tuple[object, ...], made: Pass | None, beside: Runner | None) -> None:
        self._passes[key] = made
        if beside is not None:
            weakref.finalize(beside, _forget, weakref.ref(self), key)
        if len(self._passes) > MOST_CAPTURES:
            self.forget(next(iter(self._passes)))

    def forget(self, key: tuple[object, ...]) -> None:
        """Give the capture of this key up."""
        self._passes.pop(key, None)
        self._uses.pop(key, None)

    def _captured(
        self, module: nn.Module, inputs: tuple[Tensor, ...], moved: tuple[Tensor, ...], beside: Runner | None
    ) -> Pass | None:
        """None where that cannot be: the module is then made anew each time, and its parts are captured one by one."""
        packing = self.packing if beside is None else Together((self.packing, beside.packing))
        try:
            with whole():
                return capture(module, inputs, moved, packing, self._pool)
        except Uncapturable as error:
            self._tell(str(error))
            return None
        except torch.OutOfMemoryError:
            pass  # the error holds on to memory
        torch.cuda.empty_cache()
        self._tell("memory does not suffice for captures; decode fewer requests at once, or shorter ones")
        return None

    def _tell(self, why: str) -> None:
        if why not in self.told:
            self.told.add(why)
            log.warning("passes run uncaptured, which is slower: %s", why)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or pickled drafter makes its own."""
        return type(None), ()


def _forget(owner: weakref.ref[Runner], key: tuple[object, ...]) -> None:
    runner = owner()
    if runner is not None:
        runner.forget(key)


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


R = TypeVar("R", bound=Runner)


class Lease:
    """What one call holds, so that another thread's call, or one made while this one runs, does not write into it. It
    ends with the call, or when nothing refers to it any more."""

    def __init__(self) -> None:
        self.ended = False

    def end(self) -> None:
        """All that it holds may be used by others."""
        self.ended = True

    def take(self, one: object) -> bool:
        """Whether `one` was free, and is this lease's now."""
        holder = vars(one).get("_draftsmith_lease")
        if holder is not None and holder.is_active:
            return False
        vars(one)["_draftsmith_lease"] = _Holder(self)
        return True

    def own(self, one: T) -> T:
        """`one`, or where another call is using it a copy that shares its weights and has a state of its own."""
        with PASSES:
            if not hasattr(one, "__dict__") or self.take(one):
                return one
            other = copy(one)
            vars(other).pop("_draftsmith_lease", None)
            self.take(other)
            return other


class _Holder:
    """A lease, without keeping it alive; forgotten where what it holds is copied or saved."""

    def __init__(self, lease: Lease) -> None:
        self._lease = weakref.ref(lease)

    @property
    def is_active(self) -> bool:
        lease = self._lease()
        return lease is not None and not lease.ended

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


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
        with PASSES:  # a pass hooks the model while it runs
            device = next(module.parameters()).device.type
            cast_to = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            state = hash((cast_to, *(weights_state(one) for one in (module, *others))))
            kept = vars(module).get("_draftsmith_runners")
            if kept is None or kept.state != state:
                kept = vars(module)["_draftsmith_runners"] = cls(state, packing())
            return kept

    def get(self, key: tuple[object, ...], make: Callable[[Packed], R], lease: Lease) -> R:
        """A runner of this key that no other lease holds; idle ones are given up where memory ends."""
        with PASSES:
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
    if device.type == "cuda":
        return int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return CPU_BYTES


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
    if type(tensor) not in (Tensor, nn.Parameter):  # quantised storage, which may have neither values nor a place
        return id(tensor), tensor.dtype, version
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return tensor.data_ptr(), tensor.dtype, version
    sample = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLE)]
    return tensor.data_ptr(), tensor.dtype, version, int(sample.double().sum().view(torch.long))  # nan is not nan


def _module_state(module: nn.Module) -> tuple[object, ...]:
    settings = tuple((name, _plain(value)) for name, value in vars(module).items() if name[:11] != "_draftsmith")
    hooks = (*module._forward_hooks, *module._forward_pre_hooks)  # ids of their handles, never used again
    return id(module), id(vars(module).get("forward")), hooks, settings


def _plain(value: object) -> object:
    """What of an attribute is compared: peft keeps the names of the adapters that are on in a list, and their scales in
    a dict. Lists of numbers are a drafter's own state, which every call changes."""
    if isinstance(value, list | tuple):
        return tuple(one for one in value if isinstance(one, str)) or None
    if type(value) is dict:
        return tuple((key, one) for key, one in value.items() if isinstance(one, bool | int | float | str))
    return value if isinstance(value, bool | int | float | str) else None
