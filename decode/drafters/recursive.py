"""Heads of one layer that is applied to its own output: EAGLE-3 and MTP.

Slot t starts from the target's features after token t and from token t + 1. A drafted token's node starts from what its
parent came to and from the token itself. Training unrolls exactly that (training-time test, EAGLE-3, Li et al. 2025):
in step s every slot carries on from its own output of step s - 1, a token later, and sees the true slots before it and
its own earlier steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.drafters.base import Batch, Step
from decode.drafters.drafting import Above, Steps
from decode.drafters.head_cache import Slots
from decode.drafters.head_draft import HeadDraft
from decode.drafters.labels import judged, shifted
from decode.drafters.layers import Extend
from decode.forward.masks import packed_visibility


class RecursiveDraft(HeadDraft):
    """Both faces of a recursive head but for its layer."""

    num_cached = 1

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """features (B, T, n, d) -> (B, T, d) what true slots start from."""

    @abstractmethod
    def advance(self, state: Tensor, tokens: Tensor, positions: Tensor, extend: Extend) -> Tensor:
        """(B, T, d) what slots come to: from their state (B, T, d) and their tokens (B, T)."""

    @abstractmethod
    def normed(self, state: Tensor) -> Tensor:
        """state (..., d) -> what the output head reads."""

    # training face

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """`depth` steps of T slots: step s of slot t drafts token t + 2 + s, judged by row t + 1 + s."""
        assert batch.features is not None
        unrolled = Unrolled(batch.document)
        state = self.fuse(batch.features)
        for step in range(self.config.depth):
            tokens = shifted(batch.ids, 1 + step)
            state = self.advance(state, tokens, batch.positions + step, unrolled.extend)
            rows, valid = judged(batch, 1 + step)
            yield Step(self.normed(state), self.head, rows, valid, self.vocab)

    # decoding face

    def read(self, tokens: Tensor, features: Tensor, positions: Tensor, extends: list[Extend]) -> None:
        """As `HeadDraft` says."""
        self.advance(self.fuse(features), tokens, positions, extends[0])

    def steps(self, slots: Slots, read: Tensor, ends: Tensor, features: Tensor) -> Steps:
        """The passes of one round."""
        return RecursiveSteps(self, slots, read, ends, features)


@dataclass
class RecursiveSteps:
    """One round: the true slots not read yet, then nodes behind them."""

    draft: RecursiveDraft
    slots: Slots
    read: Tensor
    ends: Tensor
    features: Tensor
    state: Tensor = field(init=False)
    """(B, W, d) what the nodes of the last level came to."""

    def first(self) -> Tensor:
        """Behind the last of the true slots."""
        width = self.read.shape[1]
        positions, (extend,) = self.slots.straight(self.ends - 1 - width, width, 1)
        state = self.draft.advance(self.draft.fuse(self.features), self.read, positions, extend)
        self.state = state[:, -1:]
        return self._logits()

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        """From what the parents came to."""
        if above is None:
            state = self.state
            positions, (extend,) = self.slots.straight(self.ends - 2 + depth, 1, 1)
        else:
            state = above.of_parents(self.state, tokens)
            positions = (self.ends - 2 + depth).expand_as(tokens)
            (extend,) = self.slots.nodes(self.ends - 1, above.visible, 1)
        self.state = self.draft.advance(state, tokens, positions, extend)
        return self._logits()

    def _logits(self) -> Tensor:
        return self.draft.logits(self.draft.normed(self.state))


class Unrolled:
    """Keys and values of all steps so far: a query of step s sees the true keys (step 0) of its document up to its own
    slot, and of later steps its own slot alone."""

    def __init__(self, document: Tensor) -> None:  # (B, T)
        self.causal = packed_visibility(document)
        self.own = torch.eye(document.shape[1], dtype=torch.bool, device=document.device).expand_as(self.causal)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `layers.Extend` says."""
        self.keys.append(keys)
        self.values.append(values)
        visible = torch.cat([self.causal, *[self.own] * (len(self.keys) - 1)], 2)
        return torch.cat(self.keys, 2), torch.cat(self.values, 2), visible
