"""What a family has to offer so that chains and trees can be drafted with it: its passes over one round's nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from decode.drafters.base import Context
from decode.forward.runner import PASSES, Runner


class Levels(Protocol):
    """The draft's passes over one round, each depth after the one before it.

    Nodes that are read (those with children) are numbered level by level, pending not among them.
    """

    def root(self) -> Tensor:
        """(B, V) logits at pending."""
        ...

    def follow(self, tokens: Tensor, depth: int) -> Tensor:
        """(B, V) logits at the one node of this depth, tokens (B, 1), in a chain."""
        ...

    def level(self, tokens: Tensor, depth: int, visible: Tensor, owners: Tensor) -> Tensor:
        """(B, W, V) logits at W nodes of one depth, tokens (B, W).

        They see the committed tokens and those of the M nodes read so far, these W included, that `visible` (1 or B, W,
        M) marks; owners (1 or B, W) are the indices of their parents in the level before, 0 under pending.
        """
        ...


class Foreseeing(Levels, Protocol):
    """Levels of a draft that predicts what becomes of its tokens."""

    def chance(self, depth: int) -> Tensor:
        """(B,) the predicted chance that the token drawn from the logits of this depth, which were the last ones made
        and those of a single node, will be accepted if those before it are. It depends on the tokens before, never on
        the one to be drawn: a chain may be cut by it."""
        ...


class Round(Protocol):
    """One round of a family: its passes as one unit over a few tensors, which can be captured, or step by step."""

    @property
    def runner(self) -> Runner:
        """What runs and captures the unit."""
        ...

    @property
    def foresees(self) -> bool:
        """Whether its levels are `Foreseeing`."""
        ...

    @property
    def key(self) -> tuple[object, ...]:
        """What the unit depends on besides shapes and draws."""
        ...

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the unit is given."""
        ...

    def moved(self) -> tuple[Tensor, ...]:
        """Inputs of the same unit a slot later (see `decode.capture`)."""
        ...

    def unit(self) -> Unit:
        """inputs -> levels, holding on to nothing of this round."""
        ...

    def steps(self) -> Levels:
        """The same passes one by one."""
        ...


class Unit(nn.Module):
    """The passes of a round, and the modules that they run.

    A trace looks for weights in what it traces, and writes down the others as constants, which it cannot do with packed
    ones: a unit that did not say what it runs was never captured on a CPU.
    """

    def __init__(self, levels: Callable[..., Levels], *modules: nn.Module) -> None:
        super().__init__()
        self.levels, self.modules_run = levels, nn.ModuleList(modules)

    def forward(self, *inputs: Tensor) -> Levels:
        """Those of the round with these inputs."""
        return self.levels(*inputs)


@dataclass(frozen=True)
class Processed:
    """Levels whose logits are processed as the target's scores will be (penalties, bans). A processor is asked while
    no pass runs: it may wait for another thread that decodes."""

    levels: Levels
    context: Context
    tokens: list[Tensor] = field(default_factory=list)
    """(B, W) of each level read so far."""

    def root(self) -> Tensor:
        """As `Levels` says."""
        with PASSES:
            logits = self.levels.root()[:, None]
        return self.context.processed(logits, logits.new_zeros(len(logits), 1, 0, dtype=torch.long))[:, 0]

    def chance(self, depth: int) -> Tensor:
        """As `Foreseeing` says."""
        with PASSES:
            return cast(Foreseeing, self.levels).chance(depth)

    def follow(self, tokens: Tensor, depth: int) -> Tensor:
        """As `Levels` says."""
        self.tokens.append(tokens)
        with PASSES:
            logits = self.levels.follow(tokens, depth)[:, None]
        return self.context.processed(logits, torch.cat(self.tokens, 1)[:, None])[:, 0]

    def level(self, tokens: Tensor, depth: int, visible: Tensor, owners: Tensor) -> Tensor:
        """As `Levels` says."""
        with PASSES:
            logits = self.levels.level(tokens, depth, visible, owners)
        self.tokens.append(tokens)
        if self.context.history is None:
            return logits
        path = (~visible).long().sort(dim=-1, stable=True).indices[..., :depth].expand(*tokens.shape, depth)
        above = torch.cat(self.tokens, 1)[:, None].expand(-1, tokens.shape[1], -1)
        return self.context.processed(logits, above.gather(2, path))


def visible_slots(runner: Runner, context: Context, reach: int) -> int:
    """Slots that the passes of a round look at which writes `reach` slots behind the longest row."""
    end = max(context.lengths) + reach
    visible = runner.visible(end)
    assert end <= visible, (context.lengths, context.shape, visible)  # else the last nodes would not see themselves
    return visible
