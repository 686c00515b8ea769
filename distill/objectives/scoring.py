"""Losses and acceptances of every slot of a batch, a chunk of rows at a time.

Never more than one (chunk_rows, V) set of logits is held (two where a draft learns more tokens than it drafts), and one
of p. Chunks are of the rows that judge the slots:
all steps that a row judges are scored while its p is at hand, which so is made once, however many steps there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from decode.drafters.base import Batch, Step
from distill.objectives.lesson import Lesson
from distill.objectives.target_distribution import TargetDistribution

if TYPE_CHECKING:
    from distill.objectives.objective import Objective

Evaluator = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Hidden states (R, d) -> differentiable loss (R,) and detached chances of acceptance (R, 3), None without p."""


@dataclass(frozen=True)
class Scores:
    """What the slots of a step are worth, one by one."""

    loss: Tensor
    """(B, M) float32, differentiable; 0 where not `learned`."""
    alpha: Tensor | None
    """(B, M) float32, detached, 0 where not `valid`: the chance of acceptance at temperature 1; None without a target
    distribution."""
    greedy: Tensor | None
    """The same at temperature 0: 1 where the draft prefers the token that the target prefers."""
    here: Tensor | None
    """The chance of acceptance at temperature 1 where the text goes on as it does: alpha is its mean over what texts
    go on with."""
    valid: Tensor
    """(B, M) bool: a slot that counts in alpha: the step's own ones, as far as there is a record of p."""
    learned: Tensor
    """(B, M) bool: a slot that counts in the loss: all valid ones, unless a reduced draft vocabulary hides the token
    to be learned."""


MOST_ROWS = 1024
MOST_ENTRIES = 1 << 25
"""Of a set of logits, 128 MB in float32; of 152k tokens that is 220 rows, few enough for memory and enough for a matrix
product."""


def rows_at_once(vocab_size: int) -> int:
    """Rows of logits that are held together where nothing is said."""
    return max(1, min(MOST_ROWS, MOST_ENTRIES // vocab_size))


def score(steps: Sequence[Step], batch: Batch, objective: Objective, chunk_rows: int) -> list[Scores]:
    """Loss and acceptance of every valid slot of every step.

    Without valid slots the loss is 0 with a zero gradient. Raises ConfigError where the objective needs more of p than
    the batch has.
    """
    target: TargetDistribution | None = batch.target
    objective.check_source(None if target is None else target.is_dense)
    judged = [Judged.of(step, batch, chunk_rows) for step in steps]
    teach = _Teacher(batch, objective)
    if all(step.head_is_frozen for step in steps):
        return _at_once(judged, teach)
    return [_recomputed(one, teach) for one in judged]


@dataclass(frozen=True)
class Judged:
    """The valid slots of a step, in the order of the rows that judge them."""

    step: Step
    valid: Tensor
    """(B, M) bool."""
    slots: Tensor
    """(N,) flat slot b*M + m."""
    rows: Tensor
    """(N,) ascending flat row b*T + t."""
    hidden: Tensor
    """(N, d)."""
    sizes: list[int]
    """Slots in each chunk of rows."""

    @classmethod
    def of(cls, step: Step, batch: Batch, chunk_rows: int) -> Judged:
        """As many chunks whatever is valid: ranks that share a head's weights (ZeRO-3) must call it equally often."""
        target: TargetDistribution | None = batch.target
        valid = step.valid
        if target is not None:
            valid = valid & target.has(step.target_rows.where(valid, 0))  # rows of other slots may lie anywhere
        slots = valid.flatten().nonzero().squeeze(-1)
        rows, order = step.target_rows.flatten()[slots].sort(stable=True)
        edges = torch.arange(0, batch.ids.numel() + chunk_rows, chunk_rows, device=rows.device)
        sizes = torch.searchsorted(rows, edges).diff().tolist()
        return cls(step, valid, slots[order], rows, step.hidden.flatten(0, 1)[slots[order]], sizes)

    def scores(self, losses: Tensor, accepted: Tensor | None, learned: Tensor) -> Scores:
        """The slots' values, put where the slots are; zeros elsewhere."""
        return Scores(
            loss=self._scattered(losses),
            alpha=None if accepted is None else self._scattered(accepted[:, 0]),
            greedy=None if accepted is None else self._scattered(accepted[:, 1]),
            here=None if accepted is None else self._scattered(accepted[:, 2]),
            valid=self.valid,
            learned=self._scattered(learned),
        )

    def _scattered(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.valid.numel()).index_copy(0, self.slots, values).view(self.valid.shape)


@dataclass(frozen=True)
class _Teacher:
    batch: Batch
    objective: Objective

    def lesson(self, rows: Tensor, vocab: Tensor | None) -> Lesson:
        """What these rows (R,) teach a draft of that vocabulary."""
        target: TargetDistribution | None = self.batch.target
        p = None if target is None else target.chunk(rows)
        return Lesson.on(vocab, p, self.batch.ids.flatten()[rows + 1])

    def evaluator(self, step: Step, lesson: Lesson) -> Evaluator:
        """What a step's hidden states are worth against a lesson of as many rows."""

        def evaluate(hidden: Tensor) -> tuple[Tensor, Tensor | None]:
            log_q = _log_softmax(step.head, hidden)
            with torch.no_grad():
                drafted = None if step.drafts_by is None else _log_softmax(step.drafts_by, hidden)
            return self.objective.loss(log_q, lesson, drafted)

        return evaluate


def _log_softmax(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return head(hidden).to(hidden.device).float().log_softmax(-1)


def _at_once(judged: Sequence[Judged], teach: _Teacher) -> list[Scores]:
    """Where the head is frozen: a row's loss depends on its own hidden state alone, so the gradient with respect to it
    is made with the loss, and the backward pass needs no logits."""
    wants_gradient = torch.is_grad_enabled()
    learned: list[list[Tensor]] = [[] for _ in judged]

    def run(hidden: Sequence[Tensor]) -> list[list[Any]]:
        found: list[list[Any]] = [[] for _ in judged]
        parts = [one.split(each.sizes) for one, each in zip(hidden, judged, strict=True)]
        rows = [each.rows.split(each.sizes) for each in judged]
        for chunk in range(len(judged[0].sizes)):
            union = torch.cat([one[chunk] for one in rows]).unique()
            lesson = teach.lesson(union, judged[0].step.vocab)
            for place, each in enumerate(judged):
                own = lesson.of(torch.searchsorted(union, rows[place][chunk]))
                evaluate = teach.evaluator(each.step, own)
                found[place].append(_with_gradient(evaluate, parts[place][chunk], wants_gradient))
                learned[place].append(teach.objective.learned(own))
        return found

    flat = _RowGradients.apply(run, *(one.hidden for one in judged))
    losses, accepted = flat[: len(judged)], flat[len(judged) :]
    return [
        one.scores(loss, chances, torch.cat(rows))
        for one, loss, chances, rows in zip(judged, losses, accepted, learned, strict=True)
    ]


class _RowGradients(torch.autograd.Function):
    """Losses of rows whose gradients with respect to the rows are at hand; a later weight scales each."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Sequence[Tensor]], list[list[Any]]], *hidden: Tensor) -> tuple[Any, ...]:
        columns = [tuple(zip(*parts, strict=True)) for parts in run(hidden)]
        losses = [torch.cat(one[0]) for one in columns]
        accepted = [None if one[1][0] is None else torch.cat(one[1]) for one in columns]
        gradients = [torch.cat(one[2]) for one in columns if one[2][0] is not None]
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*(one for one in accepted if one is not None))
        return *losses, *accepted

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        gradients = ctx.saved_tensors
        return None, *(one * weight[:, None] for one, weight in zip(gradients, upstream, strict=False))


def _with_gradient(evaluate: Evaluator, hidden: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if not wanted:
        return *evaluate(hidden), None
    with torch.enable_grad():
        rows = hidden.detach().requires_grad_()
        loss, accepted = evaluate(rows)
        (gradient,) = torch.autograd.grad(loss.sum(), rows)
    return loss.detach(), accepted, gradient


def _recomputed(judged: Judged, teach: _Teacher) -> Scores:
    """Where the head learns too: logits, and p, are made again in the backward pass (all chunks but the last, whose
    logits may stay)."""
    step, losses, accepted, learned = judged.step, [], [], []
    rows, hidden = judged.rows.split(judged.sizes), judged.hidden.split(judged.sizes)

    def evaluator(own: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor | None, Tensor]]:
        def evaluate(states: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
            lesson = teach.lesson(own, step.vocab)
            return *teach.evaluator(step, lesson)(states), teach.objective.learned(lesson)

        return evaluate

    for own, states in zip(rows, hidden, strict=True):
        evaluate, is_last = evaluator(own), len(losses) == len(rows) - 1
        found: Any = evaluate(states) if is_last else checkpoint(
            evaluate, states, use_reentrant=False, preserve_rng_state=False
        )  # fmt: skip
        for values, one in zip((losses, accepted, learned), found, strict=True):
            values.append(one)
    return judged.scores(torch.cat(losses), None if accepted[0] is None else torch.cat(accepted), torch.cat(learned))
