"""Speculative edits: the text that is being edited is the draft, taken up again behind every place where the new text
parts from it (as served by others: Cursor 2024, "Editing files at 1000 tokens per second"; OpenAI 2024, "Predicted
outputs"). What was replaced once is expected to be replaced again, so that a name is drafted as it was renamed."""

from __future__ import annotations

from collections.abc import Sequence

from decode.drafters.untrained.index.alignment import Alignment
from decode.drafters.untrained.text_drafter import Guess, RowText, TextDrafter


class EditText(RowText):
    """A request whose new text follows a source."""

    def __init__(self, source: Sequence[int], num_tokens: int) -> None:
        super().__init__(num_tokens)
        self._alignment = Alignment(source)

    def grow(self, tokens: Sequence[int]) -> None:
        """Follow them."""
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
        """A request of which nothing is written yet."""
        return EditText(prompt if self._source is None else self._source, len(prompt))
