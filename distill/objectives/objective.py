"""Objectives by name, and their evaluation chunk by chunk: never more than one (chunk_rows, V) set of logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from decode.common.errors import ConfigError
from decode.drafters.base import Batch, Step
from distill.config import ObjectiveConfig
from distill.objectives.draft_vocabulary import likeliest, places, renormalised, restricted
from distill.objectives.row_losses import acceptance, cross_entropy, forward_kl, jsd, reverse_kl, tv
from distill.objectives.target_distribution import Distribution, TargetDistribution

ObjectiveFunction = Callable[[Tensor, Distribution | None, Tensor], Tensor]


@dataclass(frozen=True)
class Objective:
    """A named loss and what it asks of the target: text alone, any record, or all of p."""

    name: str
    needs: Literal["text", "any", "dense"]
    fn: ObjectiveFunction
    """(log q (R, V) float32, target distribution of the rows or None, next_ids (R,)) -> loss (R,)."""
    is_divergence: bool = False
    """Compares whole distributions: on a reduced draft vocabulary it needs p renormalised, and cannot learn from rows
    whose likeliest token lies outside. What measures acceptance must not renormalise: mass outside is not accepted."""

    def check_source(self, is_dense: bool | None) -> None:
        """Raise ConfigError where p is missing (None), or sparse and the objective needs all of it."""
        if self.needs != "text" and is_dense is None:
            raise ConfigError(
                f"objective={self.name} compares with the target's distribution, and none is at hand: give records= "
                "(or a live target), or use objective=cross_entropy, which learns from text alone"
            )
        if self.needs == "dense" and not is_dense:
            raise ConfigError(
                f"objective={self.name} needs p on the draft's support, and these records are sparse (head_tail or "
                "topk): an estimate of it from the target's samples has unbounded weights. Use records.store=[full] "
                "or [last_hidden] in distill, a live target, or objective=forward_kl or tv"
            )


OBJECTIVES: dict[str, Objective] = {
    "cross_entropy": Objective("cross_entropy", "text", cross_entropy),
    "forward_kl": Objective("forward_kl", "any", forward_kl, is_divergence=True),
    "tv": Objective("tv", "any", tv),
    "reverse_kl": Objective("reverse_kl", "dense", reverse_kl, is_divergence=True),
    "jsd": Objective("jsd", "dense", jsd, is_divergence=True),
}


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective of `config`."""
    objective = OBJECTIVES[config.name]
    return replace(objective, fn=partial(jsd, beta=config.beta)) if config.name == "jsd" else objective


@dataclass(frozen=True)
class Scores:
    """What the slots of a step are worth, one by one."""

    loss: Tensor
    """(B, M) float32, differentiable; 0 where not `learned`."""
    alpha: Tensor | None
    """(B, M) float32, detached, 0 where not `valid`; None without a target distribution."""
    valid: Tensor
    """(B, M) bool: a slot that counts in alpha: the step's own ones, as far as there is a record of p."""
    learned: Tensor
    """(B, M) bool: a slot that counts in the loss: all valid ones, unless a reduced draft vocabulary hides the token
    to be learned."""


def chunked(step: Step, batch: Batch, objective: Objective, chunk_rows: int) -> Scores:
    """Loss and acceptance of every valid slot, `chunk_rows` rows of logits at a time.

    Logits are made again in the backward pass (all chunks but the last, whose logits may stay). Without valid slots the
    loss is 0 with a zero gradient. The head is called equally often whatever is valid, on empty chunks if need be,
    because ranks that share its weights (ZeRO-3) must call it together. Raises ConfigError where the objective needs
    more of p than the batch has.
    """
    target: TargetDistribution | None = batch.target
    objective.check_source(None if target is None else target.is_dense)
    valid = step.valid
    if target is not None:
        valid = valid & target.has(step.target_rows.where(valid, 0))  # rows of other slots may lie anywhere
    slots = valid.flatten().nonzero().squeeze(-1)
    hidden, rows = step.hidden.flatten(0, 1)[slots], step.target_rows.flatten()[slots]
    next_ids = batch.ids.flatten()[rows + 1]
    parts = []
    for start in range(0, valid.numel(), chunk_rows):
        part = slice(start, start + chunk_rows)
        evaluate = _evaluator(step, objective, target, rows[part], next_ids[part])
        is_last = start + chunk_rows >= valid.numel()
        parts.append(evaluate(hidden[part]) if is_last else _recomputed(evaluate, hidden[part]))
    losses, alphas, learned = zip(*parts, strict=True)
    return Scores(
        loss=_scatter(losses, slots, valid),
        alpha=None if target is None else _scatter(alphas, slots, valid),
        valid=valid,
        learned=_scatter(learned, slots, valid),
    )


Evaluator = Callable[[Tensor], tuple[Tensor, Tensor | None, Tensor]]


def _evaluator(
    step: Step, objective: Objective, target: TargetDistribution | None, rows: Tensor, next_ids: Tensor
) -> Evaluator:
    def evaluate(hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        p = None if target is None else target.chunk(rows)
        log_q = step.head(hidden).float().log_softmax(-1)
        loss_p, known, next_at, learned = p, p, next_ids, torch.ones_like(rows, dtype=torch.bool)
        if step.vocab is not None:
            loss_p, known, next_at, learned = _through(step.vocab, objective, p, next_ids)
        loss = objective.fn(log_q, loss_p, next_at).where(learned, 0.0)
        return loss, None if known is None else acceptance(log_q.detach(), known), learned

    return evaluate


def _through(
    vocab: Tensor, objective: Objective, p: Distribution | None, next_ids: Tensor
) -> tuple[Distribution | None, Distribution | None, Tensor, Tensor]:
    """(p of the loss, p of the acceptance, next ids, rows that can be learned), on a reduced draft vocabulary."""
    next_at, is_inside = places(next_ids, vocab)
    within = None if p is None else restricted(p, vocab)
    if objective.is_divergence:
        assert p is not None
        return renormalised(p, vocab), within, next_at, places(likeliest(p), vocab)[1]
    learned = is_inside if objective.needs == "text" else torch.ones_like(is_inside)
    return within, within, next_at, learned


def _recomputed(evaluate: Evaluator, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    return checkpoint(evaluate, hidden, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]


def _scatter(parts: tuple[Tensor, ...], slots: Tensor, valid: Tensor) -> Tensor:
    """The chunks' rows, put where their slots are; zeros elsewhere."""
    rows = torch.cat(parts)
    return rows.new_zeros(valid.numel()).index_copy(0, slots, rows).view(valid.shape)
