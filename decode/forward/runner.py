"""What runs passes over a slot cache: how many slots a pass looks at, and captures of passes that come again."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from decode.common.progress import get_logger
from decode.forward.cache import SlotCache
from decode.forward.capture import Pass, Uncapturable, capture
from decode.forward.packed_linear import Packed, Together
from decode.forward.passes import holding
from decode.forward.slot_stack import bucket, cheap_slots

log = get_logger("decode")

BUCKET = 256  # slots: capacities are rounded up, so that calls of similar length share captures
CAPTURE_AFTER = 6  # uses of one shape: a capture costs about as much as that many passes
MOST_CAPTURES = {"cpu": 256, "cuda": 128}
"""Of one runner, the one not used for longest given up first: settings of the draws are part of a capture, and adaptive
drafting has one for every depth and number of slots. On a CPU one takes 3 to 6 MB, and `kept.runners` bounds those."""
PREFILL_CHUNK = 512  # tokens of a row in a pass: bounds the (T, S) mask and the activations of a long prompt
NARROWEST = 32  # tokens of a row, where many are read together
PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Of all rows of a pass: rows that are read together part after this many, so that a short prompt is not padded to the
end of a long one. Measured on one core, a 135M target in bfloat16: 512 tokens 0.22 s, whether of 32 rows or of 8, and
2,048 tokens 0.99 s."""

_CAPTURES = threading.Lock()
"""Held while a capture is made, of any model: it sets what warnings and logs the process shows. Passes go on."""
_serials = itertools.count()


class _Unit(threading.local):
    runs = False
    is_hurried = False
    uses: dict[tuple[object, ...], int] | None = None
    room = 0


_unit = _Unit()


@contextmanager
def _with(name: str, value: object) -> Iterator[None]:
    before = getattr(_unit, name)
    setattr(_unit, name, value)
    try:
        yield
    finally:
        setattr(_unit, name, before)


def whole() -> AbstractContextManager[None]:
    """What runs inside is part of a larger unit, which is captured as a whole."""
    return _with("runs", True)


def captured_at_once() -> AbstractContextManager[None]:
    """What runs inside is captured at its first use: parts that are timed alone may be run nowhere else."""
    return _with("is_hurried", True)


def repeatable() -> AbstractContextManager[None]:
    """What runs inside is replayed from its sixth use on, whatever was captured before: a capture rounds otherwise than
    its pass, and the same calls shall give the same bits in a process that has made others before."""
    return _with("uses", {})


def in_unit() -> bool:
    """Whether a larger unit runs, on packed weights perhaps."""
    return _unit.runs


@dataclass
class Look:
    """How many slots passes look at."""

    least: int = 0
    fewest: int | None = None
    """Of the passes that were run."""

    @property
    def slots(self) -> int:
        """That all of them look at, as far as is known."""
        return max(self.least, self.fewest or 0)


_look: ContextVar[Look | None] = ContextVar("slots that every pass looks at, at least", default=None)


@contextmanager
def look_at(slots: int) -> Iterator[Look]:
    """Passes inside look at so many slots, as far as the cache has them, where fewer would do: those of a longer text
    are captured so without one."""
    look = Look(slots)
    token = _look.set(look)
    try:
        yield look
    finally:
        _look.reset(token)


def room_for(tokens: int) -> AbstractContextManager[None]:
    """Rows of the calls inside have room for so many tokens, the longest text of all: calls of one room share captures,
    whatever their prompts."""
    return _with("room", tokens)


def least_room() -> int:
    """Tokens that a row has room for, at least."""
    return _unit.room


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

    def passes(self, beside: Runner | None = None) -> AbstractContextManager[None]:
        """Inside the block passes over its cache may run, and over that of `beside`."""
        return holding(*self.packing.models, *(() if beside is None else beside.packing.models))

    def visible(self, end: int) -> int:
        """Slots that a pass over all rows looks at whose last node lies before slot `end`: those of the cache, which is
        laid out anew where it has too few, or more than twice as many as needed since a long row has left, and no
        fewer than cost nothing. The parts of a unit keep what it began with, by which its capture is found: they may
        need fewer than it was given."""
        look = _look.get() or Look()
        end = max(end, min(max(look.least, self._cheap_slots), self.cache.capacity))
        if 2 * bucket(end) <= self.cache.num_slots and not in_unit():
            self.cache.lay_out(bucket(end))
        self.cache.hold(end)
        look.fewest = min(look.fewest or self.cache.num_slots, self.cache.num_slots)
        return self.cache.num_slots

    @cached_property
    def _cheap_slots(self) -> int:
        weights = sum(one.nbytes for model in self.packing.models for one in model.parameters())
        return cheap_slots(weights, self.cache.num_bytes // self.cache.capacity, self.cache.num_rows)

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
        with self.passes(beside):
            if not (at_once or _unit.is_hurried) and self._is_new(key):
                self.replayed = False
                with whole():
                    return make()(*inputs)
            self.replayed = key in self._passes
            if key not in self._passes:
                self._keep(key, self._captured(make(), inputs, moved(), beside), beside)
            made = self._passes[key] = self._passes.pop(key)  # the last one used stands last
            return (made or make())(*inputs)

    def _is_new(self, key: tuple[object, ...]) -> bool:
        """Whether this use of `key` comes too early for a replay; counted."""
        if _unit.uses is None and key in self._passes:
            return False
        uses = self._uses if _unit.uses is None else _unit.uses
        place = (self.serial, *key)
        uses[place] = uses.get(place, 0) + 1
        return uses[place] < CAPTURE_AFTER

    def _keep(self, key: tuple[object, ...], made: Pass | None, beside: Runner | None) -> None:
        self._passes[key] = made
        if beside is not None:
            weakref.finalize(beside, _forget, weakref.ref(self), key)
        if len(self._passes) > MOST_CAPTURES.get(self.device.type, 64):
            self.forget(next(iter(self._passes)))

    def forget(self, key: tuple[object, ...]) -> None:
        """Give the capture of this key up."""
        self._passes.pop(key, None)
        self._uses.pop((self.serial, *key), None)

    def _captured(
        self, module: nn.Module, inputs: tuple[Tensor, ...], moved: tuple[Tensor, ...], beside: Runner | None
    ) -> Pass | None:
        """None where that cannot be: the module is then made anew each time, and its parts are captured one by one."""
        runners = [self] if beside is None else [self, beside]
        packing = self.packing if beside is None else Together(tuple(one.packing for one in runners))

        def stored() -> list[Tensor]:
            return [held for one in runners for held in one.cache.stored]

        try:
            with _CAPTURES, whole():
                return capture(module, inputs, moved, packing, self._pool, stored)
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


def chunks(begin: list[int], end: list[int], device: str = "cpu") -> Iterator[tuple[list[int], int, int]]:
    """(rows, start, stop) of the passes that read tokens begin[b] ... end[b] - 1 of each row: rows that begin at the
    same token are read together, and a row whose end a pass has reached is in no later one."""
    groups: dict[int, list[int]] = {}
    for row, first in enumerate(begin):
        groups.setdefault(first, []).append(row)
    for start, rows in groups.items():
        while rows := [row for row in rows if end[row] > start]:
            width = min(max(NARROWEST, PREFILL_TOKENS.get(device, 16384) // len(rows)), PREFILL_CHUNK)
            stop = min(start + width, max(end[row] for row in rows))
            yield rows, start, stop
            start = stop


def rounded(capacity: int) -> int:
    """Slots of a cache that holds `capacity` tokens."""
    return -(-capacity // BUCKET) * BUCKET
