"""Drafts of a language model with a tokenizer of its own: it reads the target's text in its own tokens, and drafts
those that both vocabularies have (token-level intersection, Timor et al. 2025, arXiv:2502.05202)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.autotune.budget import REHEARSED
from decode.drafters.base import Context, Drafter
from decode.drafters.drafting import Above, Processed, propose_steps
from decode.drafters.untrained.foreign.reader import WIDTHS, Reader
from decode.drafters.untrained.foreign.rows import ForeignRow, MappedRow, SpelledRow
from decode.drafters.untrained.foreign.shared_tokens import SharedTokens
from decode.trees.tree import Tree
from decode.trees.tree_plans import Shape, chain

IMPOSSIBLE = -1e30
"""Score of a token that the draft does not have: finite, since a target may be allowed no others."""


class ForeignDrafter(Drafter):
    """Draws chains from the draft's distribution over the tokens that both have (TLI there), under every rule as a
    draft with the target's own tokens would."""

    family = "foreign"
    on_host = True

    def __init__(self, model: PreTrainedModel, shared: SharedTokens) -> None:
        self.model, self.shared = model, shared
        self._rows: list[ForeignRow | None] = []
        self._texts: list[list[int] | None] = []
        self.reader: Reader | None = None
        self._rehearsed = 0

    def ways(self, shape: Shape) -> int:  # noqa: ARG002 - the same of all
        """Widths of a round's first pass."""
        return len(WIDTHS)

    def start(self, context: Context, capacity: int) -> None:
        self._rows = [None] * len(context.lengths)
        self.reader = Reader(self.model, len(context.lengths), capacity, context.lease)
        self._steps = SharedSteps(self.reader, self.shared)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """Requests begin in these rows, of mapped tokens where all can be."""
        for row in lengths:
            self._rows[row] = MappedRow(self.shared) if self.shared.are_all else SpelledRow(self.shared)
        self._follow(context, list(lengths), 1)
        assert self.reader is not None
        with self.reader.runner.passes():
            self.reader.catch_up(self._texts)

    def prepare(self, context: Context) -> tuple[()] | None:
        """Read what was written, if there is anything to go on from."""
        running = list(range(len(self._rows))) if context.running is None else context.running
        self._follow(context, running, context.shape.depth)
        return () if any(self._texts) or REHEARSED.get() is not None else None

    def propose(self, context: Context) -> Tree:
        """A chain a row, one token of the draft for each of the target."""
        assert self.reader is not None
        with self.reader.runner.passes():
            self._begin(context.shape.depth)
        drawn = "iid" if context.drawn == "swor" else context.drawn
        context = replace(context, shape=chain(context.shape.depth), drawn=drawn)
        return propose_steps(Processed(self._steps, context, self.reader.runner), context)

    def _begin(self, depth: int) -> None:
        """The draft reads the texts, to draft so many tokens behind them."""
        assert self.reader is not None
        width = None
        if REHEARSED.get() is not None:
            width = WIDTHS[self._rehearsed % len(WIDTHS)]
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
            text = row.exact
            self._texts[number] = text if text and len(text) + room <= self.reader.longest else None


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
