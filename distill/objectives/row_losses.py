"""Losses per row: a chunk of draft distributions and the target's distribution of the same rows -> loss.

p is the target's distribution, q the draft's. alpha = sum_v min(p_v, q_v), the chance that a drafted token is
accepted; on a sparse estimate p_hat of p it is sum_i p_hat_i min(1, q_i / p_i), which is unbiased because each log p_i
is exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from decode.acceptance import overlap
from distill.objectives.target_distribution import FLOOR, Dense, Distribution, Sparse


def cross_entropy(log_q: Tensor, target: Distribution | None, next_ids: Tensor) -> Tensor:  # (R, V), p, (R,) -> (R,)
    """-log q of the text's next token."""
    return -log_q.gather(-1, next_ids.unsqueeze(-1)).squeeze(-1)


def forward_kl(log_q: Tensor, target: Distribution | None, next_ids: Tensor) -> Tensor:
    """KL(p || q); on a sparse p sum_i p_hat_i (log p_i - log q_i), with gradient (sum_i p_hat_i) q_j - p_hat_j.

    A top-k distribution is not renormalised: that would make the draft over-confident.
    """
    if isinstance(target, Sparse):
        return (target.weight * (target.log_p - log_q.gather(-1, target.ids))).sum(-1)
    log_p = _dense(target)
    return -(log_p.exp() * (log_q - log_p)).sum(-1)  # in this order the backward pass negates rows, not all tokens


def tv(log_q: Tensor, target: Distribution | None, next_ids: Tensor) -> Tensor:
    """Total variation 1 - alpha. Its gradient vanishes where p and q hardly overlap, so start from a draft fitted by
    KL."""
    assert target is not None
    return 1.0 - acceptance(log_q, target)


def neg_log_alpha(log_q: Tensor, target: Distribution | None, next_ids: Tensor) -> Tensor:
    """-log alpha: TV's gradient divided by alpha, so that it does not vanish where p and q hardly overlap; for a p of
    one token, cross-entropy (arXiv 2602.23881). On a sparse p the log of an estimate, which is too low on average."""
    if isinstance(target, Sparse):
        kept = target.weight.log() + (log_q.gather(-1, target.ids) - target.log_p).clamp_max(0.0)
        return -kept.clamp_min(FLOOR).logsumexp(-1)
    return -torch.minimum(_dense(target), log_q).logsumexp(-1)


def reverse_kl(log_q: Tensor, target: Distribution | None, next_ids: Tensor) -> Tensor:
    """KL(q || p)."""
    return (log_q.exp() * (log_q - _dense(target))).sum(-1)


def jsd(log_q: Tensor, target: Distribution | None, next_ids: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q (GKD, Agarwal et al. 2024)."""
    log_p = _dense(target)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    loss = beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)
    return loss.sum(-1)


def acceptance(log_q: Tensor, target: Distribution) -> Tensor:  # (R, V) -> (R,)
    """alpha per row: exact on a dense distribution, unbiased on a sparse one."""
    if isinstance(target, Dense):
        return overlap(target.log_p, log_q)
    ratio = (log_q.gather(-1, target.ids) - target.log_p).clamp_max(0.0).exp()
    return (target.weight * ratio).sum(-1)


def acceptance_of(log_q: Tensor, target: Distribution, tokens: Tensor) -> Tensor:  # (R, V), p, (R,) -> (R,)
    """min(1, q / p) of one token a row: the chance that it was a draft token that stood, where the text goes on with it
    (Leviathan et al. 2023). Where a sparse p has not kept the token, q and p of all tokens that it has not kept."""
    log_q_of = log_q.gather(-1, tokens[:, None])[:, 0]
    if isinstance(target, Dense):
        return (log_q_of - target.log_p.gather(-1, tokens[:, None])[:, 0]).clamp_max(0.0).exp()
    kept = (target.ids == tokens[:, None]) & (target.weight > 0)
    log_p = target.log_p.masked_fill(~kept, FLOOR).amax(-1)
    return (log_q_of - log_p).clamp_max(0.0).exp().where(kept.any(-1), _acceptance_of_rest(log_q, target))


def _acceptance_of_rest(log_q: Tensor, target: Sparse) -> Tensor:
    same = target.ids[:, :, None] == target.ids[:, None]
    own = (target.weight > 0) & ~same.tril(-1).any(-1)  # a token that was drawn twice stands twice
    kept = torch.stack([log_q.gather(-1, target.ids), target.log_p], -1).exp() * own[..., None]
    q, p = (1 - kept.sum(1)).clamp_min(1e-6).unbind(-1)
    return (q / p).clamp_max(1.0)


def _dense(target: Distribution | None) -> Tensor:
    assert isinstance(target, Dense), "Objective.check_source lets only dense distributions come here"
    return target.log_p.clamp_min(FLOOR)
