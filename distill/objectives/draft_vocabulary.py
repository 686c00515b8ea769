"""A reduced draft vocabulary: which tokens it holds, and the target's distributions seen through it.

A draft with an output head over V_d of the target's V tokens (EAGLE-3, Li et al. 2025; FR-Spec, Zhao et al. 2025) can
draft those alone: what p holds outside of them is lost to acceptance, and must count as lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import torch
from torch import Tensor

from decode.common.errors import ConfigError
from distill.objectives.target_distribution import FLOOR, Dense, Distribution, Sparse
from distill.sequences import RecordSequences, SequenceSource


def frequent_tokens(
    source: SequenceSource, size: int, vocab_size: int, always: Collection[int] = ()
) -> tuple[Tensor, float]:
    """(size,) ascending target ids: `always` (end of text and other special tokens) and the tokens that are learned
    most often in `source`, of equally frequent ones those with lower ids. With the share of all learned tokens that
    they are; 0 where none is learned.

    Raises ConfigError where `size` does not hold what must always be in it, or exceeds the target's vocabulary.
    """
    if size > vocab_size:
        raise ConfigError(
            f"draft.head.vocab={size} is more than the {vocab_size} tokens of the target; use null to draft all of them"
        )
    if size < len(set(always)):
        raise ConfigError(
            f"draft.head.vocab={size} has no room for the {len(set(always))} special tokens of the target, and a draft "
            "that cannot end a text drafts past every end. Use a larger one, 32000 say"
        )
    counts = np.zeros(vocab_size, dtype=np.int64)
    for ids in _learned_ids(source):
        counts += np.bincount(ids, minlength=vocab_size)
    wanted = counts.copy()
    wanted[list(always)] = np.iinfo(np.int64).max
    kept = np.sort(np.argsort(-wanted, kind="stable")[:size])
    return torch.from_numpy(kept), float(counts[kept].sum() / max(1, counts.sum()))


def _learned_ids(source: SequenceSource) -> Iterator[np.ndarray]:
    if isinstance(source, RecordSequences):  # without the distributions and states, which are most of a record
        yield from source.folder.learned_ids(source.indices, source.max_length)
        return
    for index in range(len(source)):
        sequence = source[index]
        yield sequence.ids[sequence.loss_mask]


def places(ids: Tensor, vocab: Tensor) -> tuple[Tensor, Tensor]:  # (...), (V_d,) -> (...) int64, (...) bool
    """Where target ids stand in the ascending `vocab` (0 where they do not), and whether they do."""
    at = torch.searchsorted(vocab, ids).clamp_max(len(vocab) - 1)
    inside = vocab[at] == ids
    return at.where(inside, 0), inside


def restricted(p: Distribution, vocab: Tensor) -> Distribution:
    """p on the draft vocabulary, indexed as there, with the mass that it has there: what acceptance is computed on."""
    if isinstance(p, Dense):
        return Dense(p.log_p[:, vocab])
    at, inside = places(p.ids, vocab)
    return Sparse(at, p.log_p, p.weight * inside)


def renormalised(p: Distribution, vocab: Tensor) -> Distribution:
    """p on the draft vocabulary, given that the token lies there: what a divergence of two distributions needs.

    A sparse distribution keeps its total, so that a top-k one, which sums to less than 1, is not made over-confident.
    """
    within = restricted(p, vocab)
    if isinstance(within, Dense):
        return Dense(within.log_p.clamp_min(FLOOR).log_softmax(-1))
    assert isinstance(p, Sparse)
    share = (within.weight.sum(-1, keepdim=True) / p.weight.sum(-1, keepdim=True)).clamp_min(1e-6)
    return Sparse(within.ids, within.log_p - share.log(), within.weight / share)


def likeliest(p: Distribution) -> Tensor:  # (R,) int64
    """The target id that p gives most to; sparse records always hold it."""
    if isinstance(p, Dense):
        return p.log_p.argmax(-1)
    best = p.log_p.masked_fill(p.weight <= 0, -torch.inf).argmax(-1, keepdim=True)
    return p.ids.gather(-1, best).squeeze(-1)
