"""Losses and acceptances of every slot of a batch, a chunk of rows at a time.

Never more than one (chunk_rows, V) set of logits is held (two where a draft learns more tokens than it drafts), and one
of p. Chunks are of the rows that judge the slots:
all steps that a row judges are scored while its p is at hand, which so is made once, however many steps there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from decode.drafters.base import Batch, Step
from distill.objectives.lesson import Lesson
from distill.objectives.target_distribution import TargetDistribution

if TYPE_CHECKING:
    from distill.objectives.objective import Objective

Evaluator = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Hidden states (R, d) -> differentiable loss (R,) and detached chances of acceptance (R, 3); None without p, or where
they are not asked for."""


@dataclass(frozen=True)
class Scores:
    """What the slots of a step are worth, one by one."""

    loss: Tensor
    """(B, M) float32, differentiable; 0 where not `learned`."""
    alpha: Tensor | None
    """(B, M) float32, detached, 0 where not `valid`: the chance of acceptance at temperature 1; None without a target
    distribution, or unasked."""
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


def score(
    steps: Sequence[Step],
    batch: Batch,
    objective: Objective,
    chunk_rows: int,
    alike: bool = False,
    chances: bool = True,
) -> list[Scores]:
    """Loss and acceptance of every valid slot of every step; the loss alone without `chances`. `alike` is of a caller
    who takes the plain sum of all losses, or a multiple of it: a head's weights then learn without their logits being
    made twice.

    Without valid slots the loss is 0 with a zero gradient. Raises ConfigError where the objective needs more of p than
    the batch has.
    """
    target: TargetDistribution | None = batch.target
    objective.check_source(None if target is None else target.is_dense)
    judged = [Judged.of(step, batch, chunk_rows) for step in steps]
    teach = _Teacher(batch, objective, chances or objective.reads_alpha)
    if all(_is_at_hand(step.head_weights, alike) for step in steps):
        return _at_once(judged, teach)
    return [_recomputed(one, teach) for one in judged]


def _is_at_hand(weights: tuple[Tensor, ...] | None, alike: bool) -> bool:
    """Whether their gradients can be made with the loss: not those that an engine spreads over processes, as fsdp2 by
    a type of its own and DeepSpeed by `ds_id`."""
    if weights is None or not (alike or not _learning(weights)):
        return False
    return all(type(one) in (Tensor, nn.Parameter) and not hasattr(one, "ds_id") for one in weights)


def _learning(weights: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """Those that do; under adapters a head's own are frozen."""
    return tuple(one for one in weights or () if one.requires_grad)


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
    chances: bool

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
                other = step.drafts_by if self.chances else None
                drafted = None if other is None else _log_softmax(other, hidden)
            return self.objective.loss(log_q, lesson, drafted, self.chances)

        return evaluate


def _log_softmax(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return head(hidden).to(hidden.device).log_softmax(-1, torch.float32)


def _at_once(judged: Sequence[Judged], teach: _Teacher) -> list[Scores]:
    """A row's loss depends on its own hidden state and on the head's weights alone, so that their gradients are made
    with the loss, and the backward pass needs no logits (Hsu et al. 2024, Liger Kernel, for cross-entropy)."""
    wants_gradient = torch.is_grad_enabled()
    learned: list[list[Tensor]] = [[] for _ in judged]

    def run(hidden: Sequence[Tensor], sums: Mapping[int, Tensor]) -> list[list[Any]]:
        found: list[list[Any]] = [[] for _ in judged]
        parts = [one.split(each.sizes) for one, each in zip(hidden, judged, strict=True)]
        rows = [each.rows.split(each.sizes) for each in judged]
        for chunk in range(len(judged[0].sizes)):
            union = torch.cat([one[chunk] for one in rows]).unique()
            lesson = teach.lesson(union, judged[0].step.vocab)
            for place, each in enumerate(judged):
                own = lesson.of(torch.searchsorted(union, rows[place][chunk]))
                evaluate, weights = teach.evaluator(each.step, own), _learning(each.step.head_weights)
                found[place].append(_with_gradient(evaluate, parts[place][chunk], weights, sums, wants_gradient))
                learned[place].append(teach.objective.learned(own))
        return found

    every = [one for each in judged for one in _learning(each.step.head_weights)] if wants_gradient else []
    weights = {id(one): one for one in every}
    flat = _RowGradients.apply(run, list(weights), *(one.hidden for one in judged), *weights.values())
    losses, accepted = flat[: len(judged)], flat[len(judged) :]
    return [
        one.scores(loss, chances, torch.cat(rows))
        for one, loss, chances, rows in zip(judged, losses, accepted, learned, strict=True)
    ]


class _RowGradients(torch.autograd.Function):
    """Losses of rows whose gradients with respect to the rows are at hand; a later weight scales each. Those with
    respect to a head's weights are sums over all rows, which one number must scale."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., list[list[Any]]], names: list[int], *given: Tensor) -> tuple[Any, ...]:
        hidden, weights = given[: len(given) - len(names)], given[len(given) - len(names) :]
        sums = {name: torch.zeros_like(one) for name, one in zip(names, weights, strict=True)}
        columns = [tuple(zip(*parts, strict=True)) for parts in run(hidden, sums)]
        losses = [torch.cat(one[0]) for one in columns]
        accepted = [None if one[1][0] is None else torch.cat(one[1]) for one in columns]
        ctx.gradients = [torch.cat(one[2]) for one in columns if one[2][0] is not None]
        ctx.sums = list(sums.values())
        ctx.mark_non_differentiable(*(one for one in accepted if one is not None))
        return *losses, *accepted

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        gradients, sums, ctx.gradients, ctx.sums = ctx.gradients, ctx.sums, None, None  # in place: no graph runs twice
        counts = upstream[: len(gradients)]
        if sums:
            every = torch.cat(counts)
            same = every[:1] if len(every) else every.new_zeros(1)
            assert bool((every == same).all()), "slots count differently, and the gradient of the head is a plain sum"
            sums = [one.mul_(same.to(one.device)) for one in sums]
        return None, None, *(one * weight[:, None] for one, weight in zip(gradients, counts, strict=True)), *sums


def _with_gradient(
    evaluate: Evaluator, hidden: Tensor, weights: Sequence[Tensor], sums: Mapping[int, Tensor], wanted: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, chances, gradient of the hidden states); that of each weight is added to its sum."""
    if not wanted:
        return *evaluate(hidden), None
    with torch.enable_grad():
        rows = hidden.detach().requires_grad_()
        loss, accepted = evaluate(rows)
        gradient, *others = torch.autograd.grad(loss.sum(), [rows, *weights])
    for weight, one in zip(weights, others, strict=True):
        sums[id(weight)].add_(one)
    return loss.detach(), accepted, gradient


def _recomputed(judged: Judged, teach: _Teacher) -> Scores:
    """Where the head learns too, and slots count differently: logits, and p, are made again in the backward pass (all
    chunks but the last, whose logits may stay)."""
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
