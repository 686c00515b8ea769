"""All substrings of a growing text, found in constant time a token (suffix automaton: Blumer et al. 1985, "The smallest
automaton recognizing the subwords of a text"; for drafting: Hu et al. 2024, "SAM Decoding", arXiv:2411.10666)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

DEEPEST = 32
"""Nested matches that are followed: of those that stand deeper, a later place may be missed. A text that repeats one
token nests as many as it is long, and following all of them would make every token cost as much as the whole text."""


class Match(NamedTuple):
    """The end of the text stands at an earlier place as well."""

    length: int
    """Tokens that are equal."""
    end: int
    """Index of the token behind the most recent earlier place."""


class SuffixAutomaton:
    """A state is a set of substrings that end at the same places; its link is the longest suffix of them that ends at
    more places. So the links from the last state lead through all suffixes of the text that occur earlier, the longest
    first."""

    def __init__(self, text: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._recent = [-1], [0], [0]
        self._last = 0
        self.extend(text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end; amortised constant time each."""
        for token in tokens:
            self._note_places()
            self._append(token)

    def matches(self) -> Iterator[Match]:
        """Suffixes of the text that occur earlier, the longest first, each at its most recent place; of several at one
        place the longest alone."""
        before = 0
        for state in self._path():
            if self._recent[state] != before:
                before = self._recent[state]
                yield Match(self._length[state], before)

    def _path(self) -> Iterator[int]:
        state = self._link[self._last] if self._last else 0
        for _ in range(DEEPEST):
            if state <= 0:
                return
            yield state
            state = self._link[state]

    def _note_places(self) -> None:
        """The end of the text becomes an earlier place now that a token follows it."""
        for state in self._path():
            self._recent[state] = len(self.text)

    def _append(self, token: int) -> None:
        self.text.append(token)
        new = self._state(len(self.text), {}, len(self.text))
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state < 0 else self._split(state, token)
        self._last = new

    def _split(self, state: int, token: int) -> int:
        """The state of (the longest substring of `state`, token) and its suffixes: where the one reached holds longer
        ones too, they part here."""
        reached, length = self._next[state][token], self._length[state] + 1
        if self._length[reached] == length:
            return reached
        copy = self._state(length, dict(self._next[reached]), self._recent[reached])
        self._link[copy], self._link[reached] = self._link[reached], copy
        while state >= 0 and self._next[state].get(token) == reached:
            self._next[state][token] = copy
            state = self._link[state]
        return copy

    def _state(self, length: int, following: dict[int, int], recent: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._recent.append(recent)
        self._link.append(-1)
        return len(self._next) - 1


class Cursor:
    """The longest suffix of a text that occurs in an automaton of other texts; moved token by token in amortised
    constant time."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton
        self._state = self._length = 0

    def move(self, tokens: Iterable[int]) -> None:
        """The text goes on."""
        known = self._automaton
        self._settle()
        for token in tokens:
            while self._state and token not in known._next[self._state]:
                self._state = known._link[self._state]
                self._length = known._length[self._state]
            if token in known._next[self._state]:
                self._state, self._length = known._next[self._state][token], self._length + 1

    def matches(self) -> Iterator[Match]:
        """As `SuffixAutomaton.matches`, of places in the automaton's text."""
        self._settle()
        state, length, before = self._state, self._length, 0
        for _ in range(DEEPEST):
            if state <= 0:
                return
            if self._automaton._recent[state] != before:
                before = self._automaton._recent[state]
                yield Match(length, before)
            state = self._automaton._link[state]
            length = self._automaton._length[state]

    def _settle(self) -> None:
        """The automaton may have grown, and the state have been split: back to the one that holds this length."""
        links, lengths = self._automaton._link, self._automaton._length
        while self._state and lengths[links[self._state]] >= self._length:
            self._state = links[self._state]
