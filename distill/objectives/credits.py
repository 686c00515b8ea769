"""Credit: how much each token of a round of drafting counts, given how likely it is to matter.

A token is of use only where all tokens before it were accepted. The functions here see the acceptances alpha of rounds,
(N, S) for S tokens, and weigh the losses of the same tokens; weights carry no gradient. A slot that is not valid ends
its round: what lies behind it is never drafted from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.config import ObjectiveConfig

DPACE_FLOOR = 0.5
"""D-PACE's smoothing a: qt = (1 - a) alpha + a keeps late tokens alive while early ones still fail."""


@dataclass(frozen=True)
class Rounds:
    """N rounds of S drafted tokens."""

    loss: Tensor
    """(N, S) differentiable."""
    alpha: Tensor | None
    """(N, S) detached; None where no p is known."""
    valid: Tensor
    """(N, S) bool."""
    learned: Tensor
    """(N, S) bool: valid, and in the loss."""


def credited(rounds: Rounds, config: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """(sum of weighted losses () with gradient, sum of the weights ()); their ratio is the credit-weighted mean."""
    if config.credit == "e2e_tv":
        losses, weights = end_to_end(rounds.loss, rounds.valid), reached(rounds.valid)
    else:
        losses, weights = rounds.loss, CREDITS[config.credit](rounds, config.decay)
    weights = weights.to(losses.dtype) * rounds.learned
    return (weights * losses).sum(), weights.sum()


def none(rounds: Rounds, decay: float) -> Tensor:  # -> (N, S)
    """Every token counts alike."""
    return torch.ones_like(rounds.loss)


def constant_decay(rounds: Rounds, decay: float) -> Tensor:
    """decay^s for token s = 0 .. S - 1 (Medusa's heads, EAGLE-3's training-time test)."""
    places = torch.arange(rounds.loss.shape[-1], device=rounds.loss.device)
    return (decay**places).expand_as(rounds.loss)


def dpace(rounds: Rounds, decay: float) -> Tensor:
    """w_j = sum_{m>=j} prod_{i<=m} qt_i: the accepted tokens that pass through token j (D-PACE, arXiv 2605.18810)."""
    chances = (1 - DPACE_FLOOR) * _alphas(rounds) + DPACE_FLOOR
    survival = running_product(chances * rounds.valid)
    return survival @ torch.ones(2 * survival.shape[-1:], device=survival.device).tril()  # sums from j on


def first_failure(rounds: Rounds, decay: float) -> Tensor:
    """w_j = prod_{i<j} alpha_i: tokens up to and including the first one that is rejected (Spec-AUF, arXiv 2607.01893).

    Each token is rejected with chance 1 - alpha. Instead of drawing the first rejection, each token has the chance that
    it comes no later than the first: the mean over all draws, and so no noise.
    """
    survival = running_product(_alphas(rounds) * rounds.valid)
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], -1)
    return before * reached(rounds.valid)


def end_to_end(tv: Tensor, valid: Tensor) -> Tensor:  # (N, S), (N, S) -> (N, S)
    """1 - prod_{i<=j} (1 - TV_i). Its mean over a round, 1 - mean_j prod_{i<=j} (1 - TV_i), is the share of the
    round that is lost (e2e-TV, arXiv 2606.12370)."""
    return 1.0 - running_product(torch.where(valid, 1.0 - tv, 0.0))


def running_product(factors: Tensor) -> Tensor:  # (N, S) -> (N, S)
    """prod_{i<=j} of the factors; torch's cumprod has no deterministic gradient on GPUs."""
    products = [factors[:, 0]]
    for place in range(1, factors.shape[-1]):
        products.append(products[-1] * factors[:, place])
    return torch.stack(products, -1)


def reached(valid: Tensor) -> Tensor:  # (N, S) bool
    """Slots of which all earlier ones are valid too."""
    return valid.cumprod(-1).bool()


CREDITS: dict[str, Callable[[Rounds, float], Tensor]] = {
    "none": none,
    "decay": constant_decay,
    "dpace": dpace,
    "first_failure": first_failure,
}
"""Weights by name; e2e_tv is not a weight, see `credited`."""


def _alphas(rounds: Rounds) -> Tensor:
    """Estimates from sparse records may lie above 1."""
    assert rounds.alpha is not None, "TrainConfig refuses these credits where no p is known"
    return rounds.alpha.clamp(0.0, 1.0)
