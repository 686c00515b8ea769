"""The rows of a batch: which request sits in which, how far it is, and who comes next when one is finished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class RequestState:
    """One request: its tokens so far, prompt included, and why it ended (length, eos or stop; None while it runs)."""

    prompt_length: int
    tokens: list[int]
    end: int
    """Tokens at which it ends by length."""
    reason: str | None = None
    passes: int = 0
    """Target passes that it took."""

    def extend(self, tokens: list[int], reason_to_end: Callable[[RequestState], str | None]) -> int:
        """Append until a reason to end comes up; how many were taken."""
        for taken, token in enumerate(tokens, 1):
            self.tokens.append(token)
            self.reason = reason_to_end(self)
            if self.reason is not None:
                return taken
        return len(tokens)


@dataclass
class Rows:
    """`size` rows over all requests; the others wait, in order, for a row to become free. What the host knows."""

    requests: list[RequestState]
    size: int
    seated: list[int] = field(init=False)
    """Per row, the index of its request; a finished one keeps its row until another takes it."""

    def __post_init__(self) -> None:
        self.size = min(self.size, len(self.requests))
        self.seated = list(range(self.size))
        self._next = self.size
        self._closed: set[int] = set()

    @property
    def current(self) -> list[RequestState]:
        """The seated requests, by row."""
        return [self.requests[index] for index in self.seated]

    def at(self, row: int) -> RequestState:
        """The request in one row; of a large batch `current` would be made anew for each row that asks."""
        return self.requests[self.seated[row]]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row that have reached the host, pending included."""
        return [len(one.tokens) for one in self.current]

    @property
    def running(self) -> list[int]:
        """Rows whose request has not ended."""
        return [row for row, one in enumerate(self.current) if one.reason is None]

    @property
    def ended(self) -> list[int]:
        """Rows whose request has ended since the last refill."""
        return [row for row, one in enumerate(self.current) if one.reason and self.seated[row] not in self._closed]

    def refill(self) -> list[int]:
        """Seat waiting requests in the rows of finished ones; the rows that changed."""
        self._closed.update(self.seated[row] for row in self.ended)
        changed = []
        for row, one in enumerate(self.current):
            if one.reason is not None and self._next < len(self.requests):
                self.seated[row] = self._next
                self._next += 1
                changed.append(row)
        return changed
