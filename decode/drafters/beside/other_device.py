"""A draft language model on another device than the target: what it looks at goes there, and what it drafts comes
back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from decode.drafters.base import Context, Drafter
from decode.drafters.lm import LMDraft
from decode.sampling.noise import token_table
from decode.trees.tree import Tree


class OtherDeviceDrafter(Drafter):
    """The drafts of `inner`. Noise is made on its device, of the same integers. Penalties and grammars are not
    foreseen: they look at the text where the target is, and any drafts are exact."""

    on_host = True

    def __init__(self, inner: LMDraft) -> None:
        self.inner = inner
        self._table: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Of the draft."""
        return self.inner.device

    def start(self, context: Context, capacity: int) -> None:
        self._table = token_table(len(context.noise.table), self.device)
        self.inner.start(self._moved(context), capacity)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        self.inner.read(self._moved(context), lengths)

    def prepare(self, context: Context) -> Hashable | None:
        return self.inner.prepare(self._moved(context))

    def propose(self, context: Context) -> Tree:
        tree, device = self.inner.propose(self._moved(context)), context.ids.device
        parents = tree.parents.to(device) if isinstance(tree.parents, Tensor) else tree.parents
        log_q = None if tree.log_q is None else tree.log_q.to(device)
        return replace(tree, tokens=tree.tokens.to(device), parents=parents, log_q=log_q)

    def _moved(self, context: Context) -> Context:
        assert self._table is not None
        noise, device = context.noise, self.device
        return replace(
            context,
            ids=context.ids.to(device),
            lengths=context.lengths.to(device),
            temperature=context.temperature.to(device),
            noise=replace(
                noise, keys=noise.keys.to(device), table=self._table, round_index=noise.round_index.to(device)
            ),
            gumbel=None if context.gumbel is None else context.gumbel.to(device),
            history=None,
            features=None,
            target=None,
        )


def at(drafter: Drafter | None, device: torch.device) -> Drafter | None:
    """The drafter for a target on `device`."""
    return OtherDeviceDrafter(drafter) if isinstance(drafter, LMDraft) and drafter.device != device else drafter
