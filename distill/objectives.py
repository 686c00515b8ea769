"""Objectives by name, and their evaluation chunk by chunk: never more than one (chunk_rows, V) set of logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from decode.drafters.base import Batch, Step
from decode.house.errors import ConfigError
from distill.config import ObjectiveConfig
from distill.distribution import TargetDistribution
from distill.losses import Law, Rows, cross_entropy, forward_kl, jsd, reverse_kl, tv

ObjectiveFunction = Callable[[Tensor, Law | None, Tensor], Rows]


@dataclass(frozen=True)
class Objective:
    """A named loss and what it asks of the target: text alone, any record, or all of p."""

    name: str
    needs: Literal["text", "any", "dense"]
    fn: ObjectiveFunction
    """(logits (R, V) float32, target law of the rows or None, next_ids (R,)) -> (loss (R,), detached alpha (R,) or
    None)."""

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
    "forward_kl": Objective("forward_kl", "any", forward_kl),
    "tv": Objective("tv", "any", tv),
    "reverse_kl": Objective("reverse_kl", "dense", reverse_kl),
    "jsd": Objective("jsd", "dense", jsd),
}


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective of `config`."""
    objective = OBJECTIVES[config.name]
    return replace(objective, fn=partial(jsd, beta=config.beta)) if config.name == "jsd" else objective


@dataclass(frozen=True)
class ObjectiveSums:
    """Sums over the valid slots of a step; divide once, after adding up ranks and micro-batches."""

    loss_sum: Tensor
    """() differentiable."""
    alpha_sum: Tensor
    """() float64, 0 without a target distribution."""
    count: int
    """Valid slots."""
    alpha_rows: Tensor | None
    """(B, M) alpha of each slot, 0 where it is not valid; None without a target distribution."""


def chunked(step: Step, batch: Batch, objective: Objective, chunk_rows: int) -> ObjectiveSums:
    """Loss and acceptance of every valid slot, `chunk_rows` rows of logits at a time.

    Logits are made again in the backward pass (all chunks but the last, whose logits may stay). Without valid slots the
    loss is 0 with a zero gradient. The head is called equally often whatever is valid, on empty chunks if need be,
    because ranks that share its weights (ZeRO-3) must call it together. Raises ConfigError where the objective needs
    more of p than the batch has.
    """
    assert step.vocab is None, "objectives here compare full vocabularies"
    target: TargetDistribution | None = batch.target
    objective.check_source(None if target is None else target.is_dense)
    slots = step.valid.flatten().nonzero().squeeze(-1)
    hidden, rows = step.hidden.flatten(0, 1)[slots], step.target_rows.flatten()[slots]
    next_ids = batch.ids.flatten()[rows + 1]
    loss_sum, alphas = hidden[:0].sum(), []
    for start in range(0, step.valid.numel(), chunk_rows):
        part = slice(start, start + chunk_rows)
        evaluate = _evaluator(step, objective, target, rows[part], next_ids[part])
        is_last = start + chunk_rows >= step.valid.numel()
        loss, alpha = evaluate(hidden[part]) if is_last else _recomputed(evaluate, hidden[part])
        loss_sum = loss_sum + loss
        alphas.append(alpha)
    alpha_rows = None if target is None else _scatter(alphas, slots, step.valid)
    alpha_sum = torch.zeros((), dtype=torch.float64, device=rows.device)
    return ObjectiveSums(
        loss_sum, alpha_sum if alpha_rows is None else alpha_rows.double().sum(), len(slots), alpha_rows
    )


Evaluator = Callable[[Tensor], tuple[Tensor, Tensor | None]]


def _evaluator(
    step: Step, objective: Objective, target: TargetDistribution | None, rows: Tensor, next_ids: Tensor
) -> Evaluator:
    def evaluate(hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        law = None if target is None else target.chunk(rows)
        loss, alpha = objective.fn(step.head(hidden).float(), law, next_ids)
        return loss.sum(), alpha

    return evaluate


def _recomputed(evaluate: Evaluator, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    return checkpoint(evaluate, hidden, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]


def _scatter(alphas: list[Tensor | None], slots: Tensor, valid: Tensor) -> Tensor:
    flat = torch.zeros(valid.numel(), dtype=torch.float32, device=valid.device)
    flat[slots] = torch.cat([alpha for alpha in alphas if alpha is not None] or [flat[:0]]).float()
    return flat.view(valid.shape)
