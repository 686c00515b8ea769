"""What a family offers so that chains and trees can be drafted with it: one round of it, and steps over its nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from decode.drafters.base import Context
from decode.forward.runner import PASSES, Runner


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

    def __init__(self, steps: Callable[..., Steps], *modules: nn.Module) -> None:
        super().__init__()
        self.steps, self.modules_run = steps, nn.ModuleList(modules)

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
    tokens: list[Tensor] = field(default_factory=list)
    """(B, W) of each depth read so far."""

    def first(self) -> Tensor:
        """(B, 1, V) at pending, where nothing is drafted yet."""
        with PASSES:
            logits = self.steps.first()
        return self.context.processed(logits, logits.new_zeros(len(logits), 1, 0, dtype=torch.long))

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        """(B, W, V) at tokens (B, W), each processed behind the drafted tokens of its own path."""
        with PASSES:
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
        with PASSES:
            return cast(Foreseeing, self.steps).chance(depth)


def visible_slots(runner: Runner, context: Context, reach: int) -> int:
    """Slots that the passes of a round look at which writes `reach` slots behind the longest row."""
    end = max(context.lengths) + reach
    visible = runner.visible(end)
    assert end <= visible, (context.lengths, context.shape, visible)  # else the last nodes would not see themselves
    return visible
