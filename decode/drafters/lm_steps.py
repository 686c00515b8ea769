"""A round of a draft LM, and its steps over passes of two kinds: inside a captured unit, or each captured by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from decode.drafters.drafting import Above, DraftRound, Steps, Unit, visible_slots

if TYPE_CHECKING:
    from decode.drafters.base import Context
    from decode.forward.target import CachedModel, NodePass, Part


@dataclass(frozen=True)
class LMSteps(Steps):
    """A round over passes of either kind."""

    passes: CapturedPasses | PassByPass
    read: Tensor
    """(B, width) the last committed tokens."""
    ends: Tensor
    """(B, 1) number of committed tokens."""
    tokens: int | None = None
    """Ids that are drafted, from 0 on: rows behind them stand for no token; None is all."""

    def first(self) -> Tensor:
        """Of the pass over `read`, what is at the last committed token."""
        width = self.read.shape[1]
        logits = self.passes.chain(self.read, -width)
        rows = torch.arange(len(logits), device=logits.device)
        begin = (self.ends - width).clamp(min=0)
        return of_tokens(logits[rows, (self.ends - 1 - begin)[:, 0]][:, None], self.tokens)

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        if above is None:
            return of_tokens(self.passes.chain(tokens, depth - 1), self.tokens)
        return of_tokens(self.passes.nodes(tokens, depth - 1, above.visible), self.tokens)


def of_tokens(logits: Tensor, tokens: int | None) -> Tensor:
    """(..., V) as they are, but -inf for ids from `tokens` on; None drafts all."""
    if tokens is None:
        return logits
    return pad(logits[..., :tokens], (0, logits.shape[-1] - tokens), value=-torch.inf)


@dataclass(frozen=True)
class CapturedPasses:
    """Passes inside a unit that is captured as a whole; `place` counts from the first slot behind committed tokens."""

    node_pass: NodePass
    ends: Tensor

    def chain(self, tokens: Tensor, place: int) -> Tensor:
        """(B, W, V) of tokens (B, W) that follow one another."""
        begin = self.ends + place
        return self.node_pass.chain(tokens, begin.clamp(min=0) if place < 0 else begin)[0]

    def nodes(self, tokens: Tensor, place: int, visible: Tensor) -> Tensor:
        """(B, W, V) of the last W of M nodes, tokens (B, W), visible (1 or B, W, M)."""
        depths = torch.full_like(tokens, place)
        return self.node_pass(tokens, self.ends, depths, visible.expand(len(tokens), -1, -1))[0]


@dataclass(frozen=True)
class PassByPass:
    """The same passes, each captured by itself, where something looks in between."""

    runner: CachedModel
    ends: Tensor
    longest: int
    """Bound of `ends`."""
    part: Part | None = None
    """Layers of the runner's model that draft; None is all."""

    def chain(self, tokens: Tensor, place: int) -> Tensor:
        """(B, W, V) of tokens (B, W) that follow one another."""
        last_start = max(0, self.longest + place)
        return self.runner.chain(tokens, (self.ends + place).clamp(min=0), last_start, part=self.part)

    def nodes(self, tokens: Tensor, place: int, visible: Tensor) -> Tensor:
        """(B, W, V) of the last W of M nodes, tokens (B, W), visible (1 or B, W, M)."""
        depths = torch.full((1, tokens.shape[1]), place, device=tokens.device)
        return self.runner.forward(tokens, self.ends, depths, visible, self.longest, self.part)


Passes = CapturedPasses | PassByPass


def lm_round(
    runner: CachedModel,
    context: Context,
    width: int,
    part: Part | None = None,
    make: Callable[[Passes, Tensor, Tensor], Steps] = LMSteps,
    reach: int | None = None,
) -> DraftRound:
    """One round of a draft LM, or of a part of its layers, whose cache holds all but the last `width` committed tokens.
    `make` gives its steps, from passes, the tokens that are read and their ends; they look at `reach` slots behind the
    committed tokens, None is as many as there are nodes to be read, and one.

    The first pass reads those, and of a row that has fewer all of them and whatever stands behind: the keys and values
    of that lie where nodes will be, and nobody sees them. So the pass is as wide whatever rows there are, ended ones
    among them. Nodes lie behind the committed tokens, pending among them, until the verdict.
    """
    reach = context.shape.num_read + 1 if reach is None else reach
    visible = visible_slots(runner, context, reach)
    ends = context.lengths[:, None]
    places = (ends - width).clamp(min=0) + torch.arange(width, device=ends.device)
    read = context.ids.gather(1, places)

    def unit() -> Unit:
        node_pass = runner.node_pass(visible, part)
        return Unit(
            lambda read, ends: make(CapturedPasses(node_pass, ends), read, ends),
            node_pass,
            written=node_pass.written,
        )

    return DraftRound(
        runner,
        (width, visible, part),
        (read, ends),
        moved=lambda: (runner.other(read), (ends + 1).clamp(max=visible - reach)),
        unit=unit,
        steps=lambda: make(PassByPass(runner, ends, context.longest, part), read, ends),
    )
