"""A reduced draft vocabulary: the target's laws seen through it.

A draft with an output head over V_d of the target's V tokens (EAGLE-3, Li et al. 2025; FR-Spec, Zhao et al. 2025) can
draft those alone: what p holds outside of them is lost to acceptance, and must count as lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.distribution import FLOOR, Dense, Law, Sparse


def places(ids: Tensor, vocab: Tensor) -> tuple[Tensor, Tensor]:  # (...), (V_d,) -> (...) int64, (...) bool
    """Where target ids stand in the ascending `vocab` (0 where they do not), and whether they do."""
    at = torch.searchsorted(vocab, ids).clamp_max(len(vocab) - 1)
    inside = vocab[at] == ids
    return at.where(inside, 0), inside


def restricted(law: Law, vocab: Tensor) -> Law:
    """p on the draft vocabulary, indexed as there, with the mass that it has there: what acceptance is computed on."""
    if isinstance(law, Dense):
        return Dense(law.log_p[:, vocab])
    at, inside = places(law.ids, vocab)
    return Sparse(at, law.log_p, law.weight * inside)


def renormalised(law: Law, vocab: Tensor) -> Law:
    """p on the draft vocabulary, given that the token lies there: what a divergence of two laws needs.

    A sparse law keeps its total, so that a top-k one, which sums to less than 1, is not made over-confident.
    """
    within = restricted(law, vocab)
    if isinstance(within, Dense):
        return Dense(within.log_p.clamp_min(FLOOR).log_softmax(-1))
    assert isinstance(law, Sparse)
    share = (within.weight.sum(-1, keepdim=True) / law.weight.sum(-1, keepdim=True)).clamp_min(1e-6)
    return Sparse(within.ids, within.log_p - share.log(), within.weight / share)


def likeliest(law: Law) -> Tensor:  # (R,) int64
    """The target id that p gives most to; sparse records always hold it."""
    if isinstance(law, Dense):
        return law.log_p.argmax(-1)
    best = law.log_p.masked_fill(law.weight <= 0, -torch.inf).argmax(-1, keepdim=True)
    return law.ids.gather(-1, best).squeeze(-1)
