"""Retrieval: what follows in a corpus where it says what the text says (REST: He et al. 2024); besides, what follows in
documents of the request's own, as of retrieval-augmented generation."""

from __future__ import annotations

from collections.abc import Sequence

from decode.drafters.untrained.config import LONGEST_MATCH
from decode.drafters.untrained.index.automaton import Cursor, SuffixAutomaton
from decode.drafters.untrained.index.datastore import Datastore
from decode.drafters.untrained.index.likeliest import likeliest, likeliest_chain
from decode.drafters.untrained.index.several_texts import BETWEEN, until_end
from decode.drafters.untrained.ngram import STRONGEST
from decode.drafters.untrained.text_drafter import Guess, RowText, TextDrafter

HITS = 64
"""Places of the corpus whose continuations are counted."""


class RetrievalText(RowText):
    """A request that is looked up."""

    def __init__(
        self, prompt: list[int], least: int, datastore: Datastore | None, documents: SuffixAutomaton | None
    ) -> None:
        super().__init__(len(prompt))
        self._last: list[int] = []
        self._least, self._datastore = least, datastore
        self._documents, self._cursor = documents, None if documents is None else Cursor(documents)
        self.grow(prompt)

    def grow(self, tokens: Sequence[int]) -> None:
        """Remember the last of them."""
        self._last = [*self._last, *tokens][-LONGEST_MATCH:]
        if self._cursor is not None:
            self._cursor.move(tokens)

    def guesses(self, depth: int, most: int) -> Sequence[Guess]:
        """Of the longer match: what follows in a document, or what most places of the corpus go on with."""
        length, follows = 0, list[list[int]]()
        if self._datastore is not None:
            length, follows = self._datastore.found(self._last, self._least, HITS, depth)
        in_documents = self._in_documents(depth)
        self.strength = min(max([length, *(length for length, _ in in_documents)]), STRONGEST)
        if in_documents and (not follows or in_documents[0][0] >= length):
            return [guess for _, guess in in_documents][:most]
        if most == 1:
            return [likeliest_chain(follows)] if follows else []
        return list(likeliest(follows, most))

    def _in_documents(self, depth: int) -> list[tuple[int, list[int]]]:
        """(tokens that match, what follows), the longest match first."""
        if self._documents is None or self._cursor is None:
            return []
        text = self._documents.text
        found = [
            (one.length, until_end(text[one.end : one.end + depth]))
            for one in self._cursor.matches()
            if one.length >= self._least
        ]
        return [(length, follows) for length, follows in found if follows]


class RetrievalDrafter(TextDrafter[RetrievalText]):
    """Drafts from a datastore, from documents, or from both."""

    family = "retrieval"

    def __init__(
        self, least_match: int, datastore: Datastore | None = None, documents: Sequence[Sequence[int]] = ()
    ) -> None:
        super().__init__()
        assert datastore is not None or documents
        self._least, self._datastore = least_match, datastore
        self._documents = SuffixAutomaton() if documents else None
        for one in documents:
            assert self._documents is not None
            self._documents.extend([*one, BETWEEN])

    def begin(self, prompt: list[int]) -> RetrievalText:
        """A request of which nothing is looked up yet."""
        return RetrievalText(prompt, self._least, self._datastore, self._documents)
