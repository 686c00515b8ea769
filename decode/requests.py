"""The rows of a batch: which request sits in which, how far it is, and who comes next when one is finished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Progress:
    """One request: its tokens so far, prompt included, and why it ended (length, eos or stop; None while it runs)."""

    prompt_length: int
    tokens: list[int]
    end: int
    """Tokens at which it ends by length."""
    reason: str | None = None

    def extend(self, tokens: list[int], reason_to_end: Callable[[Progress], str | None]) -> int:
        """Append until a reason to end comes up; how many were taken."""
        for taken, token in enumerate(tokens, 1):
            self.tokens.append(token)
            self.reason = reason_to_end(self)
            if self.reason is not None:
                return taken
        return len(tokens)


@dataclass
class Rows:
    """`size` rows over all requests; the others wait, in order, for a row to become free."""

    requests: list[Progress]
    size: int
    capacity: int
    device: torch.device
    seated: list[int] = field(init=False)
    """Per row, the index of its request; a finished one keeps its row until another takes it."""
    ids: Tensor = field(init=False)
    """(size, capacity) int64 tokens of the seated requests, left-aligned."""

    def __post_init__(self) -> None:
        self.size = min(self.size, len(self.requests))
        self.seated = list(range(self.size))
        self.ids = torch.zeros(self.size, self.capacity, dtype=torch.long, device=self.device)
        self._next = self.size
        for row in range(self.size):
            self._write(row)

    @property
    def current(self) -> list[Progress]:
        """The seated requests, by row."""
        return [self.requests[index] for index in self.seated]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, pending included."""
        return [len(one.tokens) for one in self.current]

    @property
    def running(self) -> list[int]:
        """Rows whose request has not ended."""
        return [row for row, one in enumerate(self.current) if one.reason is None]

    def write(self, tokens: Tensor, lengths: list[int]) -> None:
        """Put tokens (size, D) behind the first lengths[b] ones; what a row does not keep is overwritten later."""
        columns = torch.tensor(lengths, device=self.device)[:, None] + torch.arange(tokens.shape[1], device=self.device)
        self.ids.scatter_(1, columns.clamp_(max=self.capacity - 1), tokens)

    def refill(self) -> list[int]:
        """Seat waiting requests in the rows of finished ones; the rows that changed."""
        changed = []
        for row, one in enumerate(self.current):
            if one.reason is not None and self._next < len(self.requests):
                self.seated[row] = self._next
                self._next += 1
                self._write(row)
                changed.append(row)
        return changed

    def _write(self, row: int) -> None:
        tokens = self.requests[self.seated[row]].tokens
        self.ids[row, : len(tokens)] = torch.tensor(tokens, device=self.device)
