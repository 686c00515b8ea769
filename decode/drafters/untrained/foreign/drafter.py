"""What drafts of a language model with a tokenizer of its own have in common: it reads the target's text in its own
tokens (Timor et al. 2025, arXiv:2502.05202)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from transformers import PreTrainedModel

from decode.autotune.budget import REHEARSED
from decode.drafters.base import Context
from decode.drafters.untrained.foreign.reader import WIDTHS, Reader
from decode.drafters.untrained.foreign.rows import ForeignRow
from decode.drafters.untrained.foreign.shared_tokens import SharedTokens
from decode.trees.tree import Tree

MOST_OWN = 4
"""Tokens of the draft for one of the target, at most."""


class ForeignDrafter(ABC):
    """Chains of a draft LM that reads what the target has written in its own tokens."""

    family = "foreign"
    taps: tuple[int, ...] = ()
    on_host = True
    ways = len(WIDTHS)
    """Widths of a round's first pass: a warm-up takes them in turn."""

    def __init__(self, model: PreTrainedModel, shared: SharedTokens) -> None:
        self.model, self.shared = model, shared
        self._rows: list[ForeignRow | None] = []
        self._texts: list[list[int] | None] = []
        self.reader: Reader | None = None
        self._rehearsed = 0

    @abstractmethod
    def begin(self) -> ForeignRow:
        """An empty text."""

    @abstractmethod
    def text(self, row: ForeignRow) -> list[int] | None:
        """What the draft is to read of it; None where it cannot go on from there."""

    def start(self, context: Context, capacity: int) -> None:
        """A call begins."""
        self._rows = [None] * len(context.lengths)
        self.reader = Reader(self.model, len(context.lengths), capacity, context.lease)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """Requests begin in these rows."""
        for row in lengths:
            self._rows[row] = self.begin()
        self._follow(context, list(lengths), 1)
        assert self.reader is not None
        with self.reader.runner.passes():
            self.reader.catch_up(self._texts)

    def prepare(self, context: Context) -> tuple[()] | None:
        """Read what was written, if there is anything to go on from."""
        running = list(range(len(self._rows))) if context.running is None else context.running
        self._follow(context, running, MOST_OWN * context.shape.depth)
        return () if any(self._texts) or REHEARSED.get() is not None else None

    @abstractmethod
    def propose(self, context: Context) -> Tree:
        """A chain a row."""

    def _begin(self, depth: int) -> None:
        """The draft reads the texts, to draft so many tokens behind them."""
        assert self.reader is not None
        width = None
        if REHEARSED.get() is not None:
            width = WIDTHS[self._rehearsed % self.ways]
            self._rehearsed += 1
        self.reader.begin(self._texts, depth, width)

    def _follow(self, context: Context, rows: list[int], room: int) -> None:
        """The texts of these rows, where the draft's context has room for so many tokens behind them."""
        assert self.reader is not None
        lengths = context.lengths.tolist()
        self._texts = [None for _ in self._rows]
        for number in rows:
            row = self._rows[number]
            assert row is not None
            row.extend(context.ids[number, row.num_tokens : lengths[number]].tolist())
            text = self.text(row)
            self._texts[number] = text if text and len(text) + room <= self.reader.longest else None
