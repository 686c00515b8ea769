"""Speculative edits: the text that is being edited is the draft, taken up again behind every place where the new text
parts from it (as served by others: Cursor 2024, "Editing files at 1000 tokens per second"; OpenAI 2024, "Predicted
outputs"). What was replaced once is expected to be replaced again, so that a name is drafted as it was renamed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from decode.drafters.untrained.text_drafter import Guess, RowText, TextDrafter

AGREE = 2
"""Equal tokens after which the texts are taken to agree again."""
NEAR = 8
"""Tokens of the source ahead in which a single equal one is believed."""
LONGEST = 16
"""Tokens of a replacement that is remembered: longer ones are no names."""


class Alignment:
    """Follows the new text token by token; amortised constant time but for `NEAR` and `LONGEST`."""

    def __init__(self, source: Sequence[int]) -> None:
        self._source = list(source)
        self._place = 0  # next token of the source; while the texts differ, the first one that was not taken
        self._written: list[int] = []  # since the texts parted
        self._replaced: dict[int, dict[tuple[int, ...], list[int]]] = {}  # by the first token of what was replaced
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(AGREE, len(self._source) + 1):
            self._ends.setdefault(tuple(self._source[end - AGREE : end]), []).append(end)

    def follow(self, token: int) -> None:
        """The new text goes on."""
        if not self._written and self._source[self._place : self._place + 1] == [token]:
            self._place += 1
            return
        self._written.append(token)
        if self._place < len(self._source) and self._replacement(self._place)[1] == self._written:
            self._place, self._written = self._place + self._replacement(self._place)[0], []
            return
        end = self._agreed()
        if end is not None:
            self._remember(end)
            self._place, self._written = end, []

    def guesses(self, depth: int) -> list[list[int]]:
        """What follows if nothing new happens, up to `depth` tokens, the likeliest first."""
        return [found for place in self._expected() if (found := self._ahead(place, depth))]

    def _ahead(self, place: int, depth: int) -> list[int]:
        """The source from this place on; what was replaced before is replaced again."""
        found = list[int]()
        while len(found) < depth and place < len(self._source):
            taken, by = self._replacement(place)
            found += by
            place += taken
        return found[:depth]

    def _replacement(self, place: int) -> tuple[int, list[int]]:
        """(tokens of the source at this place, what stands for them)."""
        for known, by in reversed(self._replaced.get(self._source[place], {}).items()):
            if tuple(self._source[place : place + len(known)]) == known:
                return len(known), by
        return 1, [self._source[place]]

    def _agreed(self) -> int | None:
        """Behind the last tokens where they stand in the source: the nearest place ahead, or the last one before."""
        ends = self._ends.get(tuple(self._written[-AGREE:]), ())
        if not ends:
            return None
        ahead = bisect_left(ends, self._place + AGREE)
        return ends[ahead] if ahead < len(ends) else ends[-1]

    def _remember(self, end: int) -> None:
        known, by = tuple(self._source[self._place : end - AGREE]), self._written[:-AGREE]
        if 0 < len(known) <= LONGEST and len(by) <= LONGEST:
            same = self._replaced.setdefault(known[0], {})
            same.pop(known, None)
            same[known] = by  # the latest stands last

    def _expected(self) -> list[int]:
        """Where the source may go on. While that is not settled: behind the last token if it stands near, as many
        tokens on as were written (they replace others), or where it was left (they were added)."""
        if not self._written:
            return [self._place]
        near = self._source[self._place : self._place + NEAR]
        behind = [self._place + near.index(self._written[-1]) + 1] if self._written[-1] in near else []
        return [*behind, self._place + len(self._written), self._place]


class EditText(RowText):
    """A request whose new text follows a source."""

    def __init__(self, source: Sequence[int], num_tokens: int) -> None:
        super().__init__(num_tokens)
        self._alignment = Alignment(source)

    def grow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._alignment.follow(token)

    def guesses(self, depth: int, most: int) -> Sequence[Guess]:
        """How the source goes on; none at its end."""
        return self._alignment.guesses(depth)[:most]


class EditDrafter(TextDrafter[EditText]):
    """Drafts from `source`, the same for all requests; from each request's own prompt where that is None."""

    family = "edit"

    def __init__(self, source: Sequence[int] | None = None) -> None:
        super().__init__()
        self._source = source

    def begin(self, prompt: list[int]) -> EditText:
        return EditText(prompt if self._source is None else self._source, len(prompt))
