"""What rows of a batch teach a draft: the target's distribution and the text's next token, on its vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.objectives.draft_vocabulary import likeliest, places, renormalised, restricted
from distill.objectives.target_distribution import Distribution, Sparse, picked


@dataclass(frozen=True)
class Lesson:
    """R rows. Acceptance must not renormalise p, since mass outside of a reduced draft vocabulary is not accepted; a
    divergence must, since it compares whole distributions, and it cannot learn from rows whose likeliest token lies
    outside."""

    p: Distribution | None
    """With the mass that it has on the vocabulary; None where none is known."""
    normalised: Distribution | None
    """Given that the token lies in the vocabulary."""
    next_at: Tensor
    """(R,) where the text's next token stands."""
    next_is_inside: Tensor
    """(R,) bool."""
    likeliest_at: Tensor
    """(R,) where p's likeliest token stands, -1 where it lies outside or no p is known."""

    @property
    def has_mass(self) -> Tensor:
        """(R,) bool: p has any on the vocabulary; a sparse record may have kept no token of it."""
        if isinstance(self.p, Sparse):
            return self.p.weight.sum(-1) > 0
        return torch.ones_like(self.next_is_inside)

    @classmethod
    def on(cls, vocab: Tensor | None, p: Distribution | None, next_ids: Tensor) -> Lesson:
        """On a draft vocabulary (V_draft,), None for all tokens; p and next_ids (R,) are of the target's."""
        every = torch.ones_like(next_ids, dtype=torch.bool)
        best = torch.full_like(next_ids, -1) if p is None else likeliest(p)
        if vocab is None:
            return cls(p, p, next_ids, every, best)
        next_at, is_inside = places(next_ids, vocab)
        if p is None:
            return cls(None, None, next_at, is_inside, best)
        best_at, best_is_inside = places(best, vocab)
        return cls(restricted(p, vocab), renormalised(p, vocab), next_at, is_inside, best_at.where(best_is_inside, -1))

    def of(self, index: Tensor) -> Lesson:
        """That of some of the rows, (N,) ascending."""
        if len(index) == len(self.next_at):
            return self
        p = None if self.p is None else picked(self.p, index)
        other = self.normalised
        normalised = p if other is self.p or other is None else picked(other, index)
        return Lesson(p, normalised, self.next_at[index], self.next_is_inside[index], self.likeliest_at[index])
