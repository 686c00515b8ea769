"""Drafts of the tokens that both vocabularies have (token-level intersection, Timor et al. 2025, arXiv:2502.05202)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from decode.drafters.base import Context
from decode.drafters.drafting import Above, Processed, propose_steps
from decode.drafters.untrained.foreign.drafter import ForeignDrafter
from decode.drafters.untrained.foreign.reader import Reader
from decode.drafters.untrained.foreign.rows import ForeignRow, MappedRow, SpelledRow
from decode.drafters.untrained.foreign.shared_tokens import SharedTokens
from decode.trees.tree import Tree
from decode.trees.tree_plans import chain

IMPOSSIBLE = -1e30
"""Score of a token that the draft does not have: finite, since a target may be allowed no others."""


class SharedDrafter(ForeignDrafter):
    """Draws from the draft's distribution over the tokens that both have (TLI there), under every rule as a draft with
    the target's own tokens would."""

    def begin(self) -> ForeignRow:
        """Of mapped tokens, if all can be."""
        return MappedRow(self.shared) if self.shared.are_all else SpelledRow(self.shared)

    def start(self, context: Context, capacity: int) -> None:
        """A call begins."""
        super().start(context, capacity)
        assert self.reader is not None
        self._steps = SharedSteps(self.reader, self.shared)

    def text(self, row: ForeignRow) -> list[int] | None:
        """All of it."""
        return row.exact

    def propose(self, context: Context) -> Tree:
        """One token of the draft for each of the target."""
        assert self.reader is not None
        with self.reader.runner.passes():
            self._begin(context.shape.depth)
        drawn = "iid" if context.drawn == "swor" else context.drawn
        context = replace(context, shape=chain(context.shape.depth), drawn=drawn)
        return propose_steps(Processed(self._steps, context, self.reader.runner), context)


class SharedSteps:
    """The reader's steps in the target's vocabulary."""

    def __init__(self, reader: Reader, shared: SharedTokens) -> None:
        self._reader, self._size = reader, shared.target.vocab_size
        self._own, self._target = shared.pairs.to(reader.runner.device)
        self._own_of = torch.zeros(self._size, dtype=torch.long, device=self._own.device)  # others are never drawn,
        self._own_of[self._target] = self._own  # unless the target is allowed no shared one

    def first(self) -> Tensor:
        """(B, 1, V) behind the texts."""
        return self._over_target(self._reader.first())

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        """(B, 1, V) at the target's tokens (B, 1)."""
        return self._over_target(self._reader.step(self._own_of[tokens], depth, above))

    def _over_target(self, logits: Tensor) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        found = wide.new_full((*logits.shape[:-1], self._size), IMPOSSIBLE)
        return found.index_copy_(-1, self._target, wide.index_select(-1, self._own))
