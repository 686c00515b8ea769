"""Texts of requests that have ended, searched by those to come."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from decode.autotune.budget import REHEARSED
from decode.drafters.untrained.index.automaton import Cursor, Match, SuffixAutomaton
from decode.drafters.untrained.index.several_texts import BETWEEN, until_end


class Memory:
    """At least the last `size` tokens, at most twice as many; shared by calls in several threads."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._parts = [SuffixAutomaton()]

    def add(self, text: Sequence[int]) -> None:
        """Remember a text, unless it was written by a warm-up: the call that it was for would find its own."""
        if REHEARSED.get() is not None:
            return
        with self._lock:
            self._parts[-1].extend([*text, BETWEEN])
            if len(self._parts[-1].text) >= self._size:
                self._parts = [self._parts[-1], SuffixAutomaton()]

    def __reduce__(self) -> tuple[type[Memory], tuple[int]]:
        """A copied or pickled drafter remembers nothing."""
        return Memory, (self._size,)

    def reader(self) -> Reader:
        """What a new request searches."""
        with self._lock:
            return Reader(self._lock, [(part, Cursor(part)) for part in self._parts])


class Reader:
    """Places in the memory that end as one text does."""

    def __init__(self, lock: threading.Lock, parts: list[tuple[SuffixAutomaton, Cursor]]) -> None:
        self._lock, self._parts = lock, parts

    def move(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        with self._lock:
            for _, cursor in self._parts:
                cursor.move(tokens)

    def found(self, least: int, depth: int) -> list[tuple[Match, list[int]]]:
        """Matches of at least `least` tokens with what follows them, up to `depth` tokens of the same text."""
        with self._lock:
            return [
                (match, until_end(part.text[match.end : match.end + depth]))
                for part, cursor in self._parts
                for match in cursor.matches()
                if match.length >= least
            ]
