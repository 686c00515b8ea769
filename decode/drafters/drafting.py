"""What a family offers so that chains and trees can be drafted with it, one round of it and steps over its nodes; and
drafting a chain: k passes and k draws as one unit, or step by step where something looks in.

One unit, because Python between the passes costs as much as they do: six tokens of the toy's draft took 5.0 ms
step by step and 3.4 ms as one capture (2 cores)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from decode.forward.runner import Runner
from decode.sampling.noise import Stream
from decode.sampling.warp import Sampling, warp
from decode.trees.tree import Drawn, Tree, chain_parents

if TYPE_CHECKING:
    from decode.drafters.base import Allowance, Context


@dataclass(frozen=True)
class Above:
    """Where the nodes of one depth hang in a tree. Nodes that are read (those with children) are numbered depth by
    depth, pending not among them."""

    visible: Tensor
    """(1 or B, W, M) bool: which of the M nodes read so far, these W included, each of them sees."""
    owners: Tensor
    """(1 or B, W) int64: index of each one's parent among the nodes of the depth before, 0 under pending."""

    def of_parents(self, values: Tensor, tokens: Tensor) -> Tensor:
        """values (B, W', d) of the nodes of the depth before -> (B, W, d) of the parents of tokens (B, W)."""
        index = self.owners.expand_as(tokens)[..., None].expand(-1, -1, values.shape[-1])
        return values.gather(1, index)


class Steps(Protocol):
    """The draft's passes over one round, each depth after the one before it."""

    def first(self) -> Tensor:
        """(B, 1, V) logits at pending."""
        ...

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        """(B, W, V) logits at W nodes of one depth, tokens (B, W), which see the committed tokens and their own
        ancestors; without `above` (B, 1) the one node of this depth in a chain, whose passes take a third of the small
        steps."""
        ...


@dataclass
class AtOnce(Steps):
    """Steps of a draft whose one pass makes the logits of all depths, each the same at every node of its depth."""

    run: Callable[[], Tensor]
    """() -> (B, D, V)."""
    logits: Tensor = field(init=False)

    def first(self) -> Tensor:
        self.logits = self.run()
        return self.logits[:, :1]

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        return self.logits[:, depth : depth + 1].expand(-1, tokens.shape[1], -1)


class Foreseeing(Steps, Protocol):
    """Steps of a draft that predicts what becomes of its tokens."""

    def chance(self, depth: int) -> Tensor:
        """(B,) the predicted chance that the token drawn from the logits of this depth, which were the last ones made
        and those of a single node, will be accepted if those before it are. It depends on the tokens before, never on
        the one to be drawn: a chain may be cut by it."""
        ...


class Unit(nn.Module):
    """The passes of a round, and the modules that they run.

    A trace looks for weights in what it traces, and writes down the others as constants, which it cannot do with packed
    ones: a unit that did not say what it runs was never captured on a CPU.
    """

    def __init__(self, steps: Callable[..., Steps], *modules: nn.Module, written: tuple[Tensor, ...] = ()) -> None:
        """`written`: what the passes write, besides keys and values, and no later pass of the unit reads."""
        super().__init__()
        self.steps, self.modules_run, self.written = steps, nn.ModuleList(modules), written

    def forward(self, *inputs: Tensor) -> Steps:
        """Those of the round with these inputs."""
        return self.steps(*inputs)


@dataclass(frozen=True)
class DraftRound:
    """One round of a family: its passes as one unit over a few tensors, which can be captured, or step by step."""

    runner: Runner
    """What runs and captures the unit."""
    key: tuple[object, ...]
    """What the unit depends on besides shapes and draws."""
    inputs: tuple[Tensor, ...]
    """What the unit is given."""
    moved: Callable[[], tuple[Tensor, ...]]
    """Inputs of the same unit a slot later (see `capture`)."""
    unit: Callable[[], Unit]
    """inputs -> steps, holding on to nothing of this round."""
    steps: Callable[[], Steps]
    """The same passes one by one."""
    foresees: bool = False
    """Whether its steps are `Foreseeing`."""

    def run(
        self, key: tuple[object, ...], make: Callable[[Unit], nn.Module], draws: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """What the module made of the unit gives, by its capture where there is one: `draws`, then the unit's inputs
        are its own."""
        return self.runner.run(
            (*key, *self.key),
            lambda: make(self.unit()),
            (*draws, *self.inputs),
            lambda: (*draws, *self.moved()),
        )


@dataclass(frozen=True)
class Processed:
    """Steps whose logits are processed as the target's scores will be (penalties, bans). A processor is asked while
    no pass runs: it may wait for another thread that decodes."""

    steps: Steps
    context: Context
    runner: Runner
    """What the steps are passes of."""
    tokens: list[Tensor] = field(default_factory=list)
    """(B, W) of each depth read so far."""

    def first(self) -> Tensor:
        """(B, 1, V) at pending, where nothing is drafted yet."""
        with self.runner.passes():
            logits = self.steps.first()
        return self.context.processed(logits, logits.new_zeros(len(logits), 1, 0, dtype=torch.long))

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        """(B, W, V) at tokens (B, W), each processed behind the drafted tokens of its own path."""
        with self.runner.passes():
            logits = self.steps.step(tokens, depth, above)
        self.tokens.append(tokens)
        if self.context.history is None:
            return logits
        drafted = torch.cat(self.tokens, 1)[:, None]
        if above is None:
            return self.context.processed(logits, drafted)
        path = (~above.visible).long().sort(dim=-1, stable=True).indices[..., :depth].expand(*tokens.shape, depth)
        return self.context.processed(logits, drafted.expand(-1, tokens.shape[1], -1).gather(2, path))

    def chance(self, depth: int) -> Tensor:
        """(B,) as the steps foresee it."""
        with self.runner.passes():
            return cast(Foreseeing, self.steps).chance(depth)


def visible_slots(runner: Runner, context: Context, reach: int) -> int:
    """Slots that the passes of a round look at which writes `reach` slots behind the longest row."""
    end = context.longest + reach
    visible = runner.visible(end)
    assert end <= visible, (context.longest, context.shape, visible)  # else the last nodes would not see themselves
    return visible


FEW, MANY = 8, 32  # tokens that a pass catches up by: two widths, so that captures serve


def places_behind(context: Context, width: int, count: int) -> Iterator[Tensor]:
    """(B, W) places of committed tokens, pass by pass, that cover the `count` ones before each row's last `width`.

    More than those are covered, and of a short row what stands behind its end: the keys and values of that lie where
    nodes will be, and nobody sees them.
    """
    size = FEW if count <= FEW else MANY
    within = torch.arange(size, device=context.lengths.device)
    for passes in range(-(-count // size), 0, -1):
        yield (context.lengths[:, None] - width - passes * size).clamp(min=0) + within


def propose_chain(drafting: DraftRound, context: Context) -> Tree:
    """k tokens from the warped q, with the verdict's own noise where the rule shares it.

    Where the draft predicts what becomes of its tokens, they are drafted as one unit under a budget as well, and cut
    afterwards: by predictions that know the tokens before alone, one after another, as if the rest had not been drawn.
    """
    budget = context.budget
    if context.history is not None:
        return propose_steps(Processed(drafting.steps(), context, drafting.runner), context)
    k = context.num_draft_tokens
    noise, sampling = draft_noise(context), context.sampling
    draws = (context.temperature,) if noise is None else (context.temperature, noise)

    def make(unit: Unit) -> ChainPass:
        return ChainPass(unit, k, sampling, context.drawn, len(draws), budget is not None)

    key = ("chain", k, sampling, context.drawn, noise is None, budget is not None)
    tokens, log_q, *chances = drafting.run(key, make, draws)
    if budget is not None:
        k = _taken(budget, [context.of_running(row) for row in chances[0].T.tolist()])
    proposed = torch.cat([pending_tokens(context), tokens[:, :k]], 1)
    return Tree(proposed, chain_parents(k + 1), context.drawn, log_q[:, : k + 1] if context.drawn == "iid" else None)


def _taken(budget: Allowance, chances: list[list[float]]) -> int:  # (k, rows)
    """How many of k drafted tokens the budget takes; chances[i] is asked for only where all before it were taken."""
    return next((i for i, row in enumerate(chances) if not budget.takes(row, i)), len(chances))


def propose_steps(steps: Processed, context: Context) -> Tree:
    """The same tokens pass by pass, with processors that look at the prefix, to where the budget takes no more by what
    the draft predicts of the next one."""
    noise, budget = draft_noise(context), context.budget
    tokens, drawn_from = [pending_tokens(context)], []
    for depth in range(context.num_draft_tokens):
        logits = (steps.step(tokens[-1], depth) if depth else steps.first())[:, 0]
        if budget is not None:
            chance = context.of_running(steps.chance(depth).tolist())
            if not budget.takes(chance, depth):
                break
        token, source = draw(
            warp(logits, context.sampling, context.temperature),
            None if noise is None else noise[:, depth],
            context.drawn,
        )
        tokens.append(token)
        drawn_from.append(source)
    log_q = torch.stack([*drawn_from, drawn_from[-1]], 1) if context.drawn == "iid" else None
    return Tree(torch.cat(tokens, 1), chain_parents(len(tokens)), context.drawn, log_q)


class ChainPass(nn.Module):
    """(B, k) draft tokens and (B, k + 1, V) log q, whose last row repeats the one before it (node k has no children);
    log q is empty where children are drawn in any way. Where the draft `foresees`, also (B, k) predicted chances."""

    def __init__(self, unit: Unit, k: int, sampling: Sampling, drawn: Drawn, num_draws: int, foresees: bool) -> None:
        super().__init__()
        self.unit, self.k, self.sampling, self.num_draws = unit, k, sampling, num_draws
        self.drawn: Drawn = drawn
        self.foresees, self.written = foresees, unit.written

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """temperature (1,), noise (B, k, V) unless the draws are argmaxes, then the inputs of the unit."""
        temperature, *rest = given[: self.num_draws]
        steps = self.unit(*given[self.num_draws :])
        tokens: list[Tensor] = []
        drawn_from: list[Tensor] = []
        chances: list[Tensor] = []
        for depth in range(self.k):
            logits = (steps.step(tokens[-1], depth) if depth else steps.first())[:, 0]
            if self.foresees:
                chances.append(cast(Foreseeing, steps).chance(depth))
            scores = warp(logits, self.sampling, temperature)
            token, source = draw(scores, rest[0][:, depth] if rest else None, self.drawn)
            tokens.append(token)
            drawn_from.append(source)
        none = drawn_from[-1].new_zeros(0)
        log_q = torch.stack([*drawn_from, drawn_from[-1]], 1) if self.drawn == "iid" else none
        return (torch.cat(tokens, 1), log_q, *([torch.stack(chances, 1)] if self.foresees else []))


def pending_tokens(context: Context) -> Tensor:  # (B, 1)
    """The last committed token of each row."""
    return context.ids.gather(1, context.lengths[:, None] - 1)


def draft_noise(context: Context) -> Tensor | None:
    """(B, k, V) Gumbel noise of the k draws; None where they are argmaxes."""
    if context.sampling.is_greedy or (context.drawn == "arbitrary" and not context.shares_noise):
        return None
    k = context.num_draft_tokens
    if context.gumbel is not None:
        return context.gumbel[:, :k]
    positions = context.lengths[:, None] + torch.arange(k, device=context.lengths.device)
    if context.shares_noise:
        return context.noise.coupled(positions)
    if not context.is_undecided:
        return context.noise.fresh_gumbel(Stream.DRAFT, positions)
    noise = context.noise.fresh_gumbel(Stream.AHEAD, positions)
    return noise.index_fill(1, positions.new_zeros(1), 0)  # nobody judges the first one, and the likeliest hits most


def draw(scores: Tensor, noise: Tensor | None, drawn: Drawn) -> tuple[Tensor, Tensor]:
    """One token per row (B, 1) from warped scores (B, V), and the log of the very distribution that it was drawn from
    (B, V)."""
    if drawn != "iid":
        return (scores if noise is None else scores + noise).argmax(-1, keepdim=True), scores
    if noise is None:
        best = scores.argmax(-1, keepdim=True)
        return best, torch.full_like(scores, -torch.inf).scatter_(-1, best, 0.0)
    log_q = scores.log_softmax(-1)
    return (log_q + noise).argmax(-1, keepdim=True), log_q
