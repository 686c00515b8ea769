"""The module that engines wrap: a draft of any family with its objective, from a batch to sums."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from decode.acceptance import expected_tau, windows
from decode.drafters.base import Batch, Step
from distill.objectives.config import ObjectiveConfig
from distill.objectives.credits import Rounds, chances_begun, credited
from distill.objectives.objective import build_objective, warm_up_of
from distill.objectives.scoring import MOST_ROWS, Scores, score
from train.metric_sums import Sums


class DraftLoss(nn.Module):
    """Forward makes hidden states, logits and loss in one call, so that an engine's hooks see every use of a weight."""

    def __init__(self, draft: nn.Module, objective: ObjectiveConfig, window: int | None) -> None:
        """`window` is the number of draft tokens per round k of a family that drafts them one by one; None for a family
        whose steps are the tokens of a round."""
        super().__init__()
        self.draft = draft
        self.config = objective
        self.objective = build_objective(objective)
        self.warm_up = warm_up_of(objective)
        """Minimised until the loop takes it away."""
        self.window = window
        self.chunk_rows = objective.chunk_rows or MOST_ROWS
        self.counts_accepted = True
        """Whether acceptance is counted in training too: of 152k tokens a narrow draft spends a quarter of its loss
        on that."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(differentiable loss (), everything else as `Sums.tensor`).

        The loss is the credit-weighted mean over slots times the batch's learned tokens, so that batches add up and are
        divided by all learned tokens, however many slots a family makes of a token. What is reported is the weighted
        sum and its weights, whose ratio does not depend on how rows are split into batches.
        """
        steps = list(self.draft.unroll(batch))  # type: ignore[operator]
        alike = self.config.credit == "none"
        is_read = self.config.credit != "none" or any(one.confidence is not None for one in steps)
        chances = is_read or self.counts_accepted or not self.training
        scores = score(steps, batch, self.warm_up or self.objective, self.chunk_rows, alike, chances)
        learned = int(batch.next_token_rows().sum())
        weighted, weights = self._weighted_loss(scores, steps[0].begins_everywhere)
        confidence, predicted = confidence_loss(steps, scores)
        mean = weighted / weights if weights else 0.0 * weighted  # else 0 by infinity, row by row
        total = learned * (mean + self.config.confidence_weight * confidence / max(1, predicted))
        sums = self._sums(batch, scores, float(weighted.detach()), weights)
        sums += Sums(confidence_loss=float(confidence.detach()), confidence_count=predicted)
        return total, sums.tensor(total.device)

    def _weighted_loss(self, scores: list[Scores], everywhere: bool) -> tuple[Tensor, float]:
        if self.config.credit == "none":  # all slots, also those that no whole window holds
            total = torch.stack([one.loss.sum() for one in scores]).sum()
            return total, float(sum(one.learned.sum() for one in scores))
        is_on_policy = self.config.credit == "on_policy"
        rounds = tried_rounds(scores, self.window, everywhere) if is_on_policy else rounds_of(scores, self.window)
        total, weights = credited(rounds, self.config)
        return total, float(weights)

    def _sums(self, batch: Batch, scores: list[Scores], loss: float, count: float) -> Sums:
        tokens = float((batch.document >= 0).sum())
        if scores[0].alpha is None:
            return Sums(loss, count, tokens=tokens)
        slots = sum(int(one.valid.sum()) for one in scores)
        alpha, tau, rounds = self._accepted(scores)
        greedy, tau_greedy, _ = self._accepted([replace(one, alpha=one.greedy) for one in scores])
        return Sums(loss, count, alpha, slots, tau, rounds, tokens, greedy=greedy, tau_greedy=tau_greedy)

    def _accepted(self, scores: list[Scores]) -> tuple[float, float, int]:
        """(sum of alpha over slots, sum of the expected tokens per pass over rounds, rounds)."""
        alpha = sum(float(one.alpha.double().sum()) for one in scores if one.alpha is not None)
        rounds = expected_rounds(scores, self.window)
        return alpha, expected_tau(rounds) * len(rounds) if len(rounds) else 0.0, len(rounds)


def confidence_loss(steps: list[Step], scores: list[Scores]) -> tuple[Tensor, int]:
    """(sum of the cross-entropies () between predicted and actual chances of acceptance, slots they are over); zeros
    for a family that predicts none, and where no p is known."""
    total, count = torch.zeros((), device=scores[0].loss.device), 0
    for step, one in zip(steps, scores, strict=True):
        if step.confidence is not None:
            known = one.valid & (one.alpha is not None)  # no slots, yet a part of the sum: of weights that take no part
            alpha = one.loss.detach() if one.alpha is None else one.alpha  # DDP makes an error of the next step
            logits, chances = step.confidence[known].float(), alpha[known].clamp(0.0, 1.0)
            total = total + binary_cross_entropy_with_logits(logits, chances, reduction="sum")
            count += len(chances)
    return total, count


def rounds_of(scores: list[Scores], window: int | None) -> Rounds:
    """The rounds of drafting that the steps show.

    A family that unrolls once drafts token after token: its rounds are windows along T, all of whose slots are valid.
    One that unrolls k times shows the k tokens of a round as its steps.
    """
    first = scores[0]
    if len(scores) == 1 and window is not None:
        alpha = None if first.alpha is None else windows(first.alpha, first.valid, window)
        loss, learned = (windows(rows, first.valid, window) for rows in (first.loss, first.learned))
        return Rounds(loss, alpha, torch.ones_like(learned), learned)
    alphas = [one.alpha for one in scores if one.alpha is not None]
    return Rounds(
        loss=_stacked([one.loss for one in scores]),
        alpha=_stacked(alphas) if alphas else None,
        valid=_stacked([one.valid for one in scores]),
        learned=_stacked([one.learned for one in scores]),
    )


def tried_rounds(scores: list[Scores], window: int | None, everywhere: bool) -> Rounds:
    """Rounds with the chance that decoding begins each, those that the end of a text cuts short among them; without it
    where they begin at some tokens alone."""

    def rounds(rows: list[Tensor]) -> Tensor:  # -> (B, M, S)
        if len(rows) == 1 and window is not None:
            return pad(rows[0], (0, window - 1)).unfold(-1, window, 1)
        return torch.stack(rows, -1)

    here = rounds([one.here for one in scores if one.here is not None])
    loss, valid, learned = (rounds([getattr(one, name) for one in scores]) for name in ("loss", "valid", "learned"))
    begun = chances_begun(here, valid).flatten() if everywhere else None
    return Rounds(loss.flatten(0, 1), None, valid.flatten(0, 1), learned.flatten(0, 1), here.flatten(0, 1), begun)


def expected_rounds(scores: list[Scores], window: int | None) -> Tensor:  # -> (W, k)
    """The alphas of every whole round that the steps show."""
    rounds = rounds_of(scores, window)
    assert rounds.alpha is not None
    return rounds.alpha[rounds.valid.all(-1)]


def _stacked(steps: list[Tensor]) -> Tensor:  # S x (B, M) -> (B * M, S)
    return torch.stack(steps, -1).flatten(0, 1)
