"""Whose turn it is to run passes: one thread at a time over one model, while others run over other models."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

from torch import nn


class _Turn(NamedTuple):
    number: int
    lock: AbstractContextManager[bool]


_turns: dict[int, _Turn] = {}
_known: weakref.WeakKeyDictionary[nn.Module, tuple[_Turn, ...]] = weakref.WeakKeyDictionary()
"""Looking through all modules takes longer than a small pass."""
_numbers = itertools.count()
_making = threading.Lock()


@contextmanager
def holding(*models: nn.Module) -> Iterator[None]:
    """Inside the block no other thread runs passes over these models: a pass puts hooks, packed layers and an attention
    of its own on a model, which another pass over it would meet.

    What needs several models names them all at once, and again what it needs within: they are taken in one order
    everywhere, so that no two threads wait for one another.
    """
    turns = sorted({turn.number: turn for model in models for turn in _turns_of(model)}.items())
    with ExitStack() as stack:
        for _, turn in turns:
            stack.enter_context(turn.lock)
        yield


def _turns_of(model: nn.Module) -> tuple[_Turn, ...]:
    """Those of all configurations in it, where a pass sets its attention: two models may have the same one, and a model
    that is made of another's layers has the layers' own besides its own."""
    found = _known.get(model)
    if found is None:
        owners = {id(one): one for part in model.modules() if (one := getattr(part, "config", None)) is not None}
        found = _known[model] = tuple(map(_turn_of, owners.values() or [model]))
    return found


def _turn_of(owner: object) -> _Turn:
    with _making:
        if id(owner) not in _turns:
            _turns[id(owner)] = _Turn(next(_numbers), threading.RLock())
            weakref.finalize(owner, _turns.pop, id(owner), None).atexit = False
        return _turns[id(owner)]
