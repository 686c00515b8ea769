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
_numbers = itertools.count()
_making = threading.Lock()


@contextmanager
def holding(*models: nn.Module) -> Iterator[None]:
    """Inside the block no other thread runs passes over these models: a pass puts hooks, packed layers and an attention
    of its own on a model, which another pass over it would meet.

    What needs several models names them all at once, and again what it needs within: they are taken in one order
    everywhere, so that no two threads wait for one another.
    """
    turns = sorted({turn.number: turn for turn in map(_turn_of, models)}.items())
    with ExitStack() as stack:
        for _, turn in turns:
            stack.enter_context(turn.lock)
        yield


def _turn_of(model: nn.Module) -> _Turn:
    """That of its configuration, where a pass sets its attention: two models may have the same one."""
    owner = getattr(model, "config", model)
    with _making:
        if id(owner) not in _turns:
            _turns[id(owner)] = _Turn(next(_numbers), threading.RLock())
            weakref.finalize(owner, _turns.pop, id(owner), None).atexit = False
        return _turns[id(owner)]
