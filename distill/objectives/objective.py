"""Objectives by name: one loss per row, or several with weights that may depend on how much the draft is accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from decode.common.errors import ConfigError
from distill.objectives.config import ObjectiveConfig, TermName
from distill.objectives.row_losses import (
    acceptance,
    acceptance_of,
    cross_entropy,
    forward_kl,
    jsd,
    neg_log_alpha,
    reverse_kl,
    tv,
)
from distill.objectives.target_distribution import Distribution

if TYPE_CHECKING:
    from distill.objectives.lesson import Lesson

Needs = Literal["text", "any", "dense"]
"""What is asked of the target: nothing, any record of p, or all of p."""
ORDER: tuple[Needs, ...] = ("text", "any", "dense")


@dataclass(frozen=True)
class Term:
    """A loss per row."""

    needs: Needs
    fn: Callable[[Tensor, Distribution | None, Tensor], Tensor]
    """(log q (R, V) float32, target distribution of the rows or None, next_ids (R,)) -> loss (R,)."""
    is_divergence: bool = False
    """Compares whole distributions (`Lesson.normalised`)."""
    needs_overlap: bool = False
    """Is infinite where p has no mass on the draft's vocabulary."""

    def learned(self, lesson: Lesson) -> Tensor:  # (R,) bool
        """Rows that it learns from."""
        if self.is_divergence:
            return lesson.likeliest_at >= 0
        if self.needs_overlap:
            return lesson.has_mass
        return lesson.next_is_inside if self.needs == "text" else torch.ones_like(lesson.next_is_inside)

    def loss(self, log_q: Tensor, lesson: Lesson) -> Tensor:  # (R, V) -> (R,)
        """0 where it does not learn."""
        p = lesson.normalised if self.is_divergence else lesson.p
        return self.fn(log_q, p, lesson.next_at).where(self.learned(lesson), 0.0)


TERMS: dict[str, Term] = {
    "cross_entropy": Term("text", cross_entropy),
    "forward_kl": Term("any", forward_kl, is_divergence=True),
    "tv": Term("any", tv),
    "neg_log_alpha": Term("any", neg_log_alpha, needs_overlap=True),
    "reverse_kl": Term("dense", reverse_kl, is_divergence=True),
    "jsd": Term("dense", jsd, is_divergence=True),
}
Weigh = Callable[[Tensor | None], Sequence[Tensor | float]]
"""Acceptance of the rows (R,), without gradient -> the weight of each term, a number or one for each row."""


@dataclass(frozen=True)
class Objective:
    """What is minimised, row by row."""

    name: str
    terms: tuple[Term, ...]
    weigh: Weigh = lambda alpha: (1.0,)
    reads_alpha: bool = False
    """Whether `weigh` does."""

    @property
    def needs(self) -> Needs:
        """The most that a term asks of the target."""
        return ORDER[max(ORDER.index(term.needs) for term in self.terms)]

    def learned(self, lesson: Lesson) -> Tensor:  # (R,) bool
        """Rows that any term learns from."""
        return torch.stack([term.learned(lesson) for term in self.terms]).any(0)

    def loss(
        self, log_q: Tensor, lesson: Lesson, drafted: Tensor | None = None, chances: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """log q (R, V) float32 -> loss (R,) with gradient, and without, if asked for and p is known, the chances (R, 3)
        that the draft's token is accepted: at temperature 1, alpha; at 0, whether both prefer the same token; and at 1
        where the text goes on as it does. `drafted`, like log q, is what is drafted by, where that differs."""
        accepted = None
        if lesson.p is not None and chances:
            by = log_q.detach() if drafted is None else drafted
            agrees = by.argmax(-1) == lesson.likeliest_at
            here = acceptance_of(by, lesson.p, lesson.next_at).where(lesson.next_is_inside, 0.0)
            accepted = torch.stack([acceptance(by, lesson.p), agrees.to(by.dtype), here], -1)
        weighted = zip(self.weigh(None if accepted is None else accepted[:, 0]), self.terms, strict=True)
        return torch.stack([weight * term.loss(log_q, lesson) for weight, term in weighted]).sum(0), accepted

    def check_source(self, is_dense: bool | None) -> None:
        """Raise ConfigError where p is missing (None), or sparse and the objective needs all of it: an estimate from
        the target's samples has unbounded weights."""
        if self.needs != "text" and is_dense is None:
            raise ConfigError(
                f"objective={self.name} compares with the target's distribution, and none is at hand: give records= "
                "that keep p (not records.store=[]), or a live target, or use objective=cross_entropy"
            )
        if self.needs == "dense" and not is_dense:
            raise ConfigError(
                f"objective={self.name} needs p on the draft's support, and these records are sparse (head_tail or "
                "topk). Use records.store=[full] or [last_hidden] in distill, a live target, or objective=forward_kl "
                "or tv"
            )


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective of `config`, its warm-up aside."""
    if config.name == "lk_hybrid":
        return Objective(config.name, (TERMS["forward_kl"], TERMS["tv"]), partial(lk_weights, eta=config.eta), True)
    if config.name == "mixture":
        weights = tuple(config.terms.values())
        name = " + ".join(f"{weight:g} {name}" for name, weight in config.terms.items())
        return Objective(name, tuple(_term(one, config) for one in config.terms), lambda alpha: weights)
    return Objective(config.name, (_term(config.name, config),))


def warm_up_of(config: ObjectiveConfig) -> Objective | None:
    """What is minimised before `build_objective`'s; None where there is no warm-up."""
    return None if config.warm_up is None else Objective(config.warm_up, (_term(config.warm_up, config),))


def _term(name: TermName, config: ObjectiveConfig) -> Term:
    return replace(TERMS[name], fn=partial(jsd, beta=config.beta)) if name == "jsd" else TERMS[name]


def lk_weights(alpha: Tensor | None, eta: float) -> tuple[Tensor, Tensor]:
    """(of KL, of TV): exp(-eta alpha) and the rest. KL where little is accepted, as its gradient reaches everywhere;
    TV, the acceptance itself, where much is (LK losses, arXiv 2602.23881; there by batch, here row by row)."""
    assert alpha is not None, "Objective.check_source"
    kl = torch.exp(-eta * alpha.clamp(0.0, 1.0))
    return kl, 1.0 - kl
