"""Metrics on their way: sums with their counts, added over micro-steps, steps and ranks, divided once at the end."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """What a stretch of training or a validation adds up to."""

    loss: float = 0.0
    """Sum of the objective over slots, weighted by credit."""
    loss_count: float = 0.0
    """Sum of the weights: the number of slots where credit is none."""
    alpha: float = 0.0
    """Sum of sum_v min(p, q) over `alpha_count` drafted slots; none where no p is known."""
    alpha_count: float = 0.0
    tau: float = 0.0
    """Sum of the expected tokens per target pass over `tau_count` rounds of k drafted tokens."""
    tau_count: float = 0.0
    tokens: float = 0.0
    """Tokens read, padding not counted."""
    confidence_loss: float = 0.0
    """Sum of the cross-entropy of predicted acceptance over `confidence_count` slots, where a family predicts it."""
    confidence_count: float = 0.0
    greedy: float = 0.0
    """Of the `alpha_count` slots, those where draft and target prefer the same token: acceptance at temperature 0."""
    tau_greedy: float = 0.0
    """`tau` at temperature 0, over as many rounds."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def from_tensor(cls, values: Tensor) -> Sums:
        """The inverse of `tensor`."""
        return cls(*values.tolist())

    def tensor(self, device: torch.device | None = None) -> Tensor:  # (11,) float64
        """The fields in order."""
        return torch.tensor(astuple(self), dtype=torch.float64, device=device)

    def means(self) -> dict[str, float | None]:
        """loss, alpha, tau, both at temperature 0, and confidence_loss, per token, slot or round; None where none was
        counted."""
        pairs = {
            "loss": (self.loss, self.loss_count),
            "alpha": (self.alpha, self.alpha_count),
            "tau": (self.tau, self.tau_count),
            "alpha_greedy": (self.greedy, self.alpha_count),
            "tau_greedy": (self.tau_greedy, self.tau_count),
            "confidence_loss": (self.confidence_loss, self.confidence_count),
        }
        return {name: total / count if count else None for name, (total, count) in pairs.items()}
