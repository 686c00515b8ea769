"""Prompt lookup: what followed the last time that the text ended like this (Saxena 2023, prompt-lookup-decoding; the
longest match by a suffix automaton: Hu et al. 2024, arXiv:2411.10666).

Several earlier places give several guesses: the longest match first, then shorter ones that occur later. A match that
overlaps the end of the text repeats itself, so that a log or a table is drafted as long as wanted from one period.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from decode.drafters.untrained.config import NgramConfig
from decode.drafters.untrained.index.automaton import Match, SuffixAutomaton
from decode.drafters.untrained.index.memory import Memory, Reader
from decode.drafters.untrained.text_drafter import Guess, RowText, TextDrafter

STRONGEST = 6
"""Tokens of a match beyond which a longer one is told apart no more."""


class NgramText(RowText):
    """A text with an index of its own substrings."""

    def __init__(self, prompt: list[int], least_match: int, memory: Reader | None) -> None:
        super().__init__(len(prompt))
        self.index = SuffixAutomaton()
        self._least, self._memory = least_match, memory
        self.grow(prompt)

    def grow(self, tokens: Sequence[int]) -> None:
        self.index.extend(tokens)
        if self._memory is not None:
            self._memory.move(tokens)

    def guesses(self, depth: int, most: int) -> list[Guess]:
        """What followed earlier places, the longest match first; of equal ones this text's own."""
        own = (one for one in self.index.matches() if one.length >= self._least)
        found = [(one.length, self._repeated(one, depth)) for one in islice(own, most)]
        if self._memory is not None:
            found += [(one.length, guess) for one, guess in self._memory.found(self._least, depth) if guess]
            found.sort(key=lambda one: -one[0])
        self.strength = min(found[0][0], STRONGEST) if found else 0
        return [guess for _, guess in found[:most]]

    def _repeated(self, match: Match, depth: int) -> Guess:
        """What follows the match, and where the text ends, from the match on again."""
        text, period = self.index.text, len(self.index.text) - match.end
        return [text[match.end + place % period] for place in range(depth)]


class NgramDrafter(TextDrafter[NgramText]):
    """Drafts from the text itself, and from texts before it where it has a memory."""

    family = "ngram"

    def __init__(self, config: NgramConfig | None = None) -> None:
        super().__init__()
        self.config = config or NgramConfig()
        self._memory = Memory(self.config.memory) if self.config.memory else None

    def begin(self, prompt: list[int]) -> NgramText:
        return NgramText(prompt, self.config.least_match, self._memory.reader() if self._memory else None)

    def end(self, text: NgramText) -> None:
        if self._memory is not None:
            self._memory.add(text.index.text)
