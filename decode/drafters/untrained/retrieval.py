"""Retrieval: what follows in a corpus where it says what the text says (REST: He et al. 2024); besides, what follows in
documents of the request's own, as of retrieval-augmented generation."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from decode.drafters.untrained.config import LONGEST_MATCH
from decode.drafters.untrained.index.datastore import Datastore
from decode.drafters.untrained.index.memory import Memory, Reader
from decode.drafters.untrained.ngram import STRONGEST
from decode.drafters.untrained.text_drafter import Guess, RowText, TextDrafter


def likeliest(continuations: Sequence[Sequence[int]], num_nodes: int) -> list[list[int]]:
    """Paths through the `num_nodes` prefixes that most of `continuations` begin with, the most frequent first. A prefix
    is never chosen before the one that it extends."""
    counts = Counter(tuple(one[:end]) for one in continuations for end in range(1, len(one) + 1))
    ranked = heapq.nsmallest(num_nodes, counts, key=lambda path: (-counts[path], len(path)))
    inner = {path[:-1] for path in ranked}
    return [list(path) for path in ranked if path not in inner]


def likeliest_chain(continuations: Sequence[Sequence[int]]) -> list[int]:
    """Step by step what most of the continuations that agree so far go on with."""
    chain, left = list[int](), list(continuations)
    while left := [one for one in left if len(one) > len(chain)]:
        chain.append(Counter(one[len(chain)] for one in left).most_common(1)[0][0])
        left = [one for one in left if one[len(chain) - 1] == chain[-1]]
    return chain


HITS = 64
"""Places of the corpus whose continuations are counted."""


class RetrievalText(RowText):
    """A request that is looked up."""

    def __init__(self, prompt: list[int], least: int, datastore: Datastore | None, documents: Reader) -> None:
        super().__init__(len(prompt))
        self._last: list[int] = []
        self._least, self._datastore, self._documents = least, datastore, documents
        self.grow(prompt)

    def grow(self, tokens: Sequence[int]) -> None:
        self._last = [*self._last, *tokens][-LONGEST_MATCH:]
        self._documents.move(tokens)

    def guesses(self, depth: int, most: int) -> Sequence[Guess]:
        """Of the longer match: what follows in a document, or what most places of the corpus go on with."""
        length, follows = 0, list[list[int]]()
        if self._datastore is not None:
            length, follows = self._datastore.found(self._last, self._least, HITS, depth)
        found = self._documents.found(self._least, depth)
        in_documents = [(match.length, guess) for match, guess in found if guess]
        self.strength = min(max([length, *(length for length, _ in in_documents)]), STRONGEST)
        if in_documents and (not follows or in_documents[0][0] >= length):
            return [guess for _, guess in in_documents][:most]
        if most == 1:
            return [likeliest_chain(follows)] if follows else []
        return list(likeliest(follows, most))


class RetrievalDrafter(TextDrafter[RetrievalText]):
    """Drafts from a datastore, from documents, or from both."""

    family = "retrieval"

    def __init__(
        self, least_match: int, datastore: Datastore | None = None, documents: Sequence[Sequence[int]] = ()
    ) -> None:
        super().__init__()
        assert datastore is not None or documents
        self._least, self._datastore = least_match, datastore
        self._documents = Memory(sum(map(len, documents)) + 2 * len(documents))  # so large that none is forgotten
        for one in documents:
            self._documents.add(one)

    def begin(self, prompt: list[int]) -> RetrievalText:
        return RetrievalText(prompt, self._least, self._datastore, self._documents.reader())
