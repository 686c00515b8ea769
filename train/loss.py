"""The module that engines wrap: a draft of any family with its objective, from a batch to sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from decode.acceptance import expected_tau, windows
from decode.drafters.base import Batch, Step
from distill.config import ObjectiveConfig
from distill.objectives import ObjectiveSums, build_objective, chunked
from train.sums import Sums


class DraftLoss(nn.Module):
    """Forward makes hidden states, logits and loss in one call, so that an engine's hooks see every use of a weight."""

    def __init__(self, draft: nn.Module, objective: ObjectiveConfig, window: int) -> None:
        """`window` is the number of draft tokens per round that the tau estimate assumes."""
        super().__init__()
        self.draft = draft
        self.objective = build_objective(objective)
        self.chunk_rows = objective.chunk_rows
        self.window = window

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(differentiable sum of the loss over this batch's tokens (), everything else as `Sums.tensor`)."""
        steps = list(self.draft.unroll(batch))  # type: ignore[operator]
        parts = [chunked(step, batch, self.objective, self.chunk_rows) for step in steps]
        total = torch.stack([part.loss_sum for part in parts]).sum()
        return total, self._sums(batch, steps, parts, total.detach()).tensor(total.device)

    def _sums(self, batch: Batch, steps: list[Step], parts: list[ObjectiveSums], loss: Tensor) -> Sums:
        count = float(sum(part.count for part in parts))
        tokens = float((batch.document >= 0).sum())
        if batch.target is None:
            return Sums(float(loss), count, tokens=tokens)
        rounds = expected_rounds(steps, parts, self.window)
        tau = expected_tau(rounds) * len(rounds) if len(rounds) else 0.0
        alpha = sum(float(part.alpha_sum) for part in parts)
        return Sums(float(loss), count, alpha, count, tau, len(rounds), tokens)


def expected_rounds(steps: list[Step], parts: list[ObjectiveSums], window: int) -> Tensor:  # -> (W, k)
    """The alphas of every round of drafting that the steps show.

    A family that unrolls once drafts token after token: its rounds are windows along T. One that unrolls k times shows
    the k tokens of a round as its steps.
    """
    alphas = [part.alpha_rows for part in parts if part.alpha_rows is not None]
    if len(alphas) == 1:
        return windows(alphas[0], steps[0].valid, window)
    valid = torch.stack([step.valid for step in steps], -1).all(-1)
    return torch.stack(alphas, -1)[valid]
