"""The text of one request in the draft's tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from decode.drafters.untrained.foreign.shared_tokens import SharedTokens
from decode.drafters.untrained.text_drafter import Followed


class ForeignRow(Followed):
    """Follows the target's tokens."""

    @property
    @abstractmethod
    def exact(self) -> list[int] | None:
        """The draft's tokens of the text; None where it has none for what stands at the end."""


class MappedRow(ForeignRow):
    """Where the draft has all tokens of the target, they are mapped one by one; special ones that it has not are left
    out."""

    def __init__(self, shared: SharedTokens) -> None:
        self._own_of, self._lead = shared.own_of, shared.own.lead
        self._ids = list(self._lead)

    def grow(self, tokens: Sequence[int]) -> None:
        found = [self._own_of[token] for token in tokens if token in self._own_of]
        has_lead = self.num_tokens == len(tokens) and found[: len(self._lead)] == self._lead
        self._ids = found if has_lead else [*self._ids, *found]

    @property
    def exact(self) -> list[int] | None:
        return self._ids


class SpelledRow(ForeignRow):
    """What stands between special tokens is spelled anew as it is written, but for the first bytes of a character."""

    def __init__(self, shared: SharedTokens) -> None:
        self._shared, self._target, self._own = shared, shared.target, shared.own
        self._before = list(shared.own.lead)  # up to the last special token
        self._ids: list[int] = []  # the target's, behind that one
        self._read = 0  # of these the ones that are spelled
        self._text, self._spelled = "", list[int]()

    def grow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token in self._target.special:
                self._spell()
                self._end(self._shared.special.get(token))
            else:
                self._ids.append(token)
        self._spell()

    @property
    def whole(self) -> list[int]:
        """The draft's tokens of all whole characters."""
        return self._before + self._spelled

    @property
    def exact(self) -> list[int] | None:
        """Those, and what stands for the bytes behind them, if the draft has such tokens."""
        unread = [self._shared.own_of.get(token) for token in self._ids[self._read :]]
        return None if None in unread else [*self.whole, *(token for token in unread if token is not None)]

    def _spell(self) -> None:
        begin = self._read - len(self._target.last(self._ids[: self._read]))
        end = begin + self._target.whole(self._ids[begin:], self._read - begin)
        known, text = self._target.text(self._ids[begin : self._read]), self._target.text(self._ids[begin:end])
        more = text[len(known) :]
        if more:
            self._spelled = self._own.grown(self._spelled, self._text, more)
        self._text, self._read = self._text + more, end

    def _end(self, own: int | None) -> None:
        """A special token of the target, and what it is for the draft."""
        self._before = [] if [own] == self.whole else self.whole
        self._before = self._before + ([] if own is None else [own])
        self._ids, self._read, self._text, self._spelled = [], 0, "", []
