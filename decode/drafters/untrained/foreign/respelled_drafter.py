"""Drafts of text, which is spelled anew in the target's tokens (string-level exact match, Timor et al. 2025,
arXiv:2502.05202)."""

from __future__ import annotations

import math

import torch

from decode.drafters.base import Context
from decode.drafters.drafting import pending_tokens
from decode.drafters.untrained.foreign.drafter import MOST_OWN, ForeignDrafter
from decode.drafters.untrained.foreign.rows import ForeignRow, SpelledRow
from decode.drafters.untrained.trie import merged
from decode.trees.tree import Tree
from decode.trees.tree_plans import chain


class RespelledDrafter(ForeignDrafter):
    """Writes its likeliest text, which is spelled anew in the target's tokens (SLEM there)."""

    def begin(self) -> ForeignRow:
        """Spelled, so that it ends with a whole character."""
        return SpelledRow(self.shared)

    def text(self, row: ForeignRow) -> list[int] | None:
        """The whole characters of it."""
        assert isinstance(row, SpelledRow)
        return row.whole

    def propose(self, context: Context) -> Tree:
        """As many of the draft's tokens as text of so many of the target's has."""
        drafted, depth = self._drafted(self._count(context.shape.depth)), context.shape.depth
        guesses: list[list[list[int]]] = []
        for row, text, own in zip(self._rows, self._texts, drafted, strict=True):
            guess = row.guess(own) if text is not None and isinstance(row, SpelledRow) else []
            guesses.append([guess] if guess else [])
        return merged(guesses, pending_tokens(context), chain(depth))

    def _count(self, depth: int) -> int:
        pairs = [
            (len(text), row.num_tokens)
            for text, row in zip(self._texts, self._rows, strict=True)
            if text is not None and row is not None
        ]
        longest = max((own / target for own, target in pairs), default=1.0)
        return min(math.ceil(depth * longest), MOST_OWN * depth)

    def _drafted(self, count: int) -> list[list[int]]:
        assert self.reader is not None
        with self.reader.runner.passes():
            self._begin(count)
            tokens = [self.reader.first().argmax(-1)]
            for depth in range(1, count):
                tokens.append(self.reader.step(tokens[-1], depth).argmax(-1))
        return torch.cat(tokens, 1).tolist()
