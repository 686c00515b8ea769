"""What drafters on the host share: they follow the text of each row, and their guesses become a tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from decode.autotune.budget import REHEARSED
from decode.drafters.base import Context, Drafter
from decode.drafters.untrained.trie import merged
from decode.trees.tree import Tree

Guess = Sequence[int]
"""Tokens that may follow the text."""
Text = TypeVar("Text", bound="RowText")


class Followed(ABC):
    """The text of one request, as it is written."""

    num_tokens = 0
    """Of the target, that are known of it."""

    def extend(self, tokens: Sequence[int]) -> None:
        """It goes on with these."""
        self.num_tokens += len(tokens)
        self.grow(tokens)

    @abstractmethod
    def grow(self, tokens: Sequence[int]) -> None:
        """Take in what was written."""


class RowText(Followed):
    """And what may follow."""

    strength = 0
    """Of the guesses made last, in steps that are told apart: 0 where one is as good as the next."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens  # of the prompt

    @abstractmethod
    def guesses(self, depth: int, most: int) -> Sequence[Guess]:
        """At most `most` guesses of at most `depth` tokens, the best one first; none where nothing is to be drafted."""


class TextDrafter(Drafter, Generic[Text]):
    """A drafter that looks at tokens alone. Nothing is drafted in rounds in which no row has a guess."""

    on_host = True

    def __init__(self) -> None:
        self._texts: list[Text | None] = []
        self._tree: Tree | None = None

    @abstractmethod
    def begin(self, prompt: list[int]) -> Text:
        """The text of a new request."""

    def end(self, text: Text) -> None:  # noqa: B027 - most drafters forget it
        """A request has ended."""

    def start(self, context: Context, capacity: int) -> None:
        """A call begins, with which its last texts end."""
        texts: list[Text | None] = [None] * len(context.lengths)  # another call may run on a copy of this drafter
        self._texts = texts

        def end() -> None:
            for text in filter(None, texts):
                self.end(text)

        context.lease.then(end)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        for row, length in lengths.items():
            ended = self._texts[row]
            if ended is not None:
                self.end(ended)
            self._texts[row] = self.begin(context.ids[row, :length].tolist())

    def guesses(self, context: Context) -> list[Sequence[Guess]]:
        """Follow the texts; those of each row, none of rows that have ended."""
        running = range(len(self._texts)) if context.running is None else context.running
        self._follow(context, running)
        depth, most = context.shape.depth, 1 if context.shape.is_chain else context.shape.num_nodes - 1
        found: list[Sequence[Guess]] = [()] * len(self._texts)
        for row in running:
            found[row] = self._text(row).guesses(depth, most)
        return found

    def strength(self, row: int) -> int:
        """How well founded the guesses of this row are that were made last, in steps that are told apart."""
        return self._text(row).strength

    def prepare(self, context: Context) -> tuple[()] | None:
        guesses, self._tree = self.guesses(context), None
        if not (any(guesses) or self.most_passengers or REHEARSED.get() is not None):
            return None  # but passengers have their round anyhow, and a warm-up needs the passes over any guesses
        pending = context.ids.gather(1, context.lengths[:, None] - 1)
        self._tree = merged(guesses, pending, context.shape)
        return ()

    def propose(self, context: Context) -> Tree:
        assert self._tree is not None
        return self.with_passengers(self._tree)

    def with_passengers(self, tree: Tree) -> Tree:
        """The tree with what is to ride along; most have nothing."""
        return tree

    def _text(self, row: int) -> Text:
        text = self._texts[row]
        assert text is not None
        return text

    def _follow(self, context: Context, rows: Sequence[int]) -> None:
        """Read what was written since the round before."""
        lengths = context.lengths.tolist()
        for row in rows:
            text = self._text(row)
            text.extend(context.ids[row, text.num_tokens : lengths[row]].tolist())
