"""Metrics on their way: sums with their counts, added over micro-steps, steps and ranks, divided once at the end."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from decode.common.errors import RunError


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

    @property
    def rule(self) -> str:
        """What `score` compares, in words for the model card."""
        return "highest validation tau estimate" if self.tau_count else "lowest validation loss"

    def score(self) -> float:
        """By which of two validations the checkpoint is kept, larger is better: the tau estimate where p is known, else
        minus the loss; -inf where that is NaN. RunError where nothing was counted.

        Loss and acceptance part ways: an EAGLE-3 run peaked in accepted length at epoch 4.6 while its loss kept falling
        (DeepSpec issue 84).
        """
        means = self.means()
        value = means["tau"]
        if value is None:
            if means["loss"] is None:
                raise RunError(
                    "the validation counted no token: none of its rows has one that this draft learns to draft. Use a "
                    "longer sequence_length, more validation_rows, or a smaller window or draft.head.depth"
                )
            value = -means["loss"]
        return -math.inf if math.isnan(value) else value  # nothing is larger than NaN: kept once, it would stay
