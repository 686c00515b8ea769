"""The quantities every claim is made of, defined once: alpha, tau, acceptance by position, predicted speedup.

p is the target's distribution of the next token, q the draft's. Training, evaluation and reports all call these
functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class Outcome(Protocol):
    """One round of one row: how many tokens were drafted and how many of them accepted."""

    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:  # (..., V), (..., V) -> (...)
    """alpha = sum_v min(p_v, q_v) = 1 - TV(p, q): the chance that a token drawn from q is accepted (Leviathan et al.
    2023)."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def greedy_agreement(scores_p: Tensor, scores_q: Tensor) -> Tensor:  # (..., V), (..., V) -> (...)
    """alpha at temperature 0: 1 where the argmaxes of p and q agree, else 0."""
    return (scores_p.argmax(-1) == scores_q.argmax(-1)).to(scores_p.dtype)


def tau(emitted: int, passes: int) -> float:
    """Tokens emitted per target pass, the bonus token included, pooled over rounds; 0 before the first pass."""
    return emitted / passes if passes else 0.0


def acceptance_by_position(rounds: Iterable[Outcome], k: int) -> list[float]:
    """P(i-th draft token accepted | the ones before it were), i = 1..k; NaN where no round came so far."""
    tried, taken = [0] * k, [0] * k
    for one in rounds:
        for i in range(min(one.drafted, one.accepted + 1, k)):
            tried[i] += 1
            taken[i] += one.accepted > i
    return [yes / all_ if all_ else float("nan") for yes, all_ in zip(taken, tried, strict=True)]


def windows(alpha: Tensor, valid: Tensor, k: int) -> Tensor:  # (B, T), (B, T) bool -> (W, k)
    """Every run of k consecutive valid positions of a row, as rows of alphas: the rounds a k-token draft would play."""
    if alpha.shape[-1] < k:
        return alpha[..., :0].reshape(0, k)  # with its gradient: a loss of no window has one, of zeros
    kept = valid.unfold(-1, k, 1).all(-1)
    return alpha.unfold(-1, k, 1)[kept]


def expected_tau(alphas: Tensor) -> float:  # (W, k) -> float
    """1 + mean over windows of sum_j prod_{i<=j} alpha_i: tokens per pass that these acceptances promise; NaN without
    windows."""
    return 1.0 + alphas.double().cumprod(-1).sum(-1).mean().item()


def predicted_speedup(tau: float, k: int, t_target_1: float, t_draft: float, t_target_k1: float) -> float:
    """tau * t_target(1) / (k * t_draft + t_target(k + 1)), times in seconds of bare forwards timed alone."""
    return tau * t_target_1 / (k * t_draft + t_target_k1)
