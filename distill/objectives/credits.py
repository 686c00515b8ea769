"""Credit: how much each token of a round of drafting counts, given how likely it is to matter.

A token is of use only where all tokens before it were accepted. The functions here see the acceptances alpha of rounds,
(N, S) for S tokens, and weigh the losses of the same tokens; weights carry no gradient. A slot that is not valid ends
its round: what lies behind it is never drafted from there.

Training sees a round begin at every token of a text. Decoding begins one where the last one ended, and so a draft that
is verified learns from other slots (`on_policy`). Its text is the target's own, with any draft: so how often it would
try a slot of a given text follows from p and q there, and no text has to be written with the draft to know it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.objectives.config import ObjectiveConfig

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
    here: Tensor | None = None
    """(N, S) detached: chance that the text's own token is accepted; for on_policy."""
    begun: Tensor | None = None
    """(N,) `chances_begun` of each round; None where rounds begin at some tokens alone, and all count alike."""


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
    return _before(running_product(_alphas(rounds) * rounds.valid)) * reached(rounds.valid)


def on_policy(rounds: Rounds, decay: float) -> Tensor:
    """w_j = r prod_{i<j} a_i: how often decoding this text with this draft tries token j of this round. r is the chance
    that a round begins here, a_i = min(1, q / p) that the text's own token i is accepted."""
    assert rounds.here is not None, "TrainConfig refuses this credit where no p is known"
    weights = _before(running_product(rounds.here * rounds.valid)) * reached(rounds.valid)
    return weights if rounds.begun is None else rounds.begun[:, None] * weights


def chances_begun(here: Tensor, valid: Tensor) -> Tensor:  # (B, M, S), (B, M, S) -> (B, M)
    """The chance that decoding a text begins a round at each of its tokens, if rounds of S tokens begin one token after
    another, and the first one where a text does.

    A round that accepts j tokens emits j + 1, and the next begins behind those: r_t = sum over s of r_s times the
    chance that the round from s emits t - s tokens. Exact of rounds of S tokens that are drawn from q and verified by
    rejection, and of a p that is known whole.
    """
    accepted = running_product((here * valid).flatten(0, 1)).view_as(here).double().cpu()
    emitted = torch.cat([_before(accepted) - accepted, accepted[..., -1:]], -1)  # (B, M, S + 1): of 1 ... S + 1 tokens
    is_drafted = valid[..., 0].cpu()
    is_first = is_drafted & ~is_drafted.roll(1, 1).index_fill(1, torch.tensor([0]), False)
    num_starts, longest = emitted.shape[1:]
    begun = emitted.new_zeros(len(emitted), num_starts + longest)
    for start in range(num_starts):
        begun[:, start] = begun[:, start].where(is_drafted[:, start], 0.0).masked_fill(is_first[:, start], 1.0)
        begun[:, start + 1 : start + 1 + longest] += begun[:, start, None] * emitted[:, start]
    return begun[:, :num_starts].to(here)


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


def _before(products: Tensor) -> Tensor:  # (..., S) -> (..., S)
    """Those of the tokens before."""
    return torch.cat([torch.ones_like(products[..., :1]), products[..., :-1]], -1)


def reached(valid: Tensor) -> Tensor:  # (N, S) bool
    """Slots of which all earlier ones are valid too."""
    return valid.cumprod(-1).bool()


CREDITS: dict[str, Callable[[Rounds, float], Tensor]] = {
    "none": none,
    "decay": constant_decay,
    "dpace": dpace,
    "first_failure": first_failure,
    "on_policy": on_policy,
}
"""Weights by name; e2e_tv is not a weight, see `credited`."""


def _alphas(rounds: Rounds) -> Tensor:
    """Estimates from sparse records may lie above 1."""
    assert rounds.alpha is not None, "TrainConfig refuses these credits where no p is known"
    return rounds.alpha.clamp(0.0, 1.0)
