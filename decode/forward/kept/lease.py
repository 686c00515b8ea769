"""Who holds what is kept: one call at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from copy import copy
from typing import TypeVar

_TAKING = threading.RLock()
T = TypeVar("T")


class Lease:
    """What one call holds, so that another thread's call, or one made while this one runs, does not write into it. It
    ends with the call, or when nothing refers to it any more."""

    def __init__(self) -> None:
        self.ended = False
        self._then: list[Callable[[], None]] = []

    def then(self, call: Callable[[], None]) -> None:
        """Call it when this ends."""
        self._then.append(call)

    def end(self) -> None:
        """All that it holds may be used by others, once what was to be called has been: a thread of the call may still
        write into it."""
        try:
            while self._then:
                self._then.pop()()
        finally:
            self.ended = True

    def take(self, one: object) -> bool:
        """Whether `one` was free, and is this lease's now."""
        with _TAKING:
            holder = vars(one).get("_draftsmith_lease")
            if holder is not None and holder.is_active:
                return False
            vars(one)["_draftsmith_lease"] = _Holder(self)
            return True

    def own(self, one: T) -> T:
        """`one`, or where another call is using it a copy that shares its weights and has a state of its own."""
        with _TAKING:
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
