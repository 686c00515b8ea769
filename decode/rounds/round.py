"""One round of all rows as a function of tensors: draft, target pass, verdict, commit.

Invariant: the cache holds exactly the committed tokens but the last one, `pending`; node 0 of every tree is pending;
one target forward runs over [pending | draft nodes]; the token after the accepted ones is the next pending.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decode.drafters.base import Context, Drafter
from decode.forward.target import CachedModel
from decode.rounds.state import State
from decode.sampling.noise import Ledger, Noise
from decode.sampling.warp import Sampling, warp
from decode.trees.tree import Drawn, Tree, split_passengers, with_passengers
from decode.verify.verdict import Question, Verdict, Verifier


@dataclass(frozen=True)
class Rule:
    """What every round of a call depends on."""

    sampling: Sampling
    """At temperature 1 unless greedy: the temperature itself stands in the state."""
    verifier: Verifier
    drawn: Drawn
    strict_nodes: int | None = None
    """Rows of every target pass, with or without drafts, so that rounding is the same; None where that is left open."""

    @property
    def reads_coupled_noise(self) -> bool:
        """Whether target and draft share Gumbel noise."""
        return self.verifier.shares_noise and not self.sampling.is_greedy


BROKEN = -1
"""In place of the tokens accepted: the target's scores are NaN."""


class Outcome(NamedTuple):
    """What a round leaves."""

    state: State
    """Of the next round."""
    report: Tensor
    """(B, 2 + D + 1) int64 for the host, in one read: draft tokens accepted or BROKEN, levels drafted, and the
    tokens: the accepted ones, then the correction or bonus; the rest is undefined."""
    distance: Tensor | None
    """(B, D + 1) as in `Verdict`."""


class Round(nn.Module):
    """The round that `wanted` asks for, over the caches of target and draft, which it writes to.

    Nothing is read from the device and nothing uploaded, but by a drafter `on_host`, processors of the prefix, a budget
    that asks for the draft's confidence, and a ledger.
    """

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter | None,
        rule: Rule,
        wanted: Context,
        ledger: Ledger | None = None,
    ) -> None:
        """`wanted` is the context of a round over any state of these rows within its bounds; without a drafter, or of
        depth 0, nothing is drafted."""
        super().__init__()
        self.target, self.model, self.drafter, self.rule = target, target.model, drafter, rule
        self.wanted, self.ledger = wanted, ledger
        self.depth = wanted.shape.depth if drafter is not None else 0

    @property
    def written(self) -> tuple[Tensor, ...]:
        """What a commit moves, and no later step of the round reads."""
        return tuple(self.target.cache.stored)

    def written_at(self, *state: Tensor) -> tuple[Tensor, ...]:
        """Copies of the slots from pending's on that a round of this state writes to."""
        known, shape = State(*state), self.wanted.shape
        nodes = max(
            shape.num_nodes + known.passenger_positions.shape[1], shape.num_read + 2, self.rule.strict_nodes or 0
        )
        return self.target.cache.copied(known.starts + torch.arange(nodes, device=known.lengths.device))

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        """The tensors of a state -> those of an `Outcome`, one after another (`outcome`)."""
        found = self.decided(State(*state))
        distance = () if found.distance is None else (found.distance,)
        return (*found.state, found.report, *distance)

    def decided(self, state: State) -> Outcome:
        """The round itself."""
        context = self._context(state)
        tree = self._proposed(context)
        logits, passenger_logits = split_passengers(self._logits(tree, state), tree)
        verdict = self._verdict(tree, logits, context, state)
        self.target.commit(state.starts, verdict.path, tree.is_chain)
        after = state.after(verdict)
        if tree.passengers is not None:
            after = after._replace(
                passenger_logits=passenger_logits.to(state.passenger_logits.dtype),
                passenger_positions=state.starts + tree.passengers.depths,
            )
        drafted = torch.full_like(verdict.num_accepted, tree.max_depth)
        accepted = verdict.num_accepted.masked_fill(logits[:, 0].isnan().any(-1), BROKEN)
        report = torch.cat([accepted[:, None], drafted[:, None], verdict.tokens], 1)
        return Outcome(after, report, verdict.distance)

    def _context(self, state: State) -> Context:
        """`wanted`, of this state."""
        noise = Noise(state.keys, self.wanted.noise.table, state.round_index, self.ledger)
        gumbel = noise.coupled(state.positions(self.depth)) if self.rule.reads_coupled_noise else None
        return replace(
            self.wanted,
            ids=state.ids,
            lengths=state.lengths,
            temperature=state.temperature,
            passenger_logits=state.passenger_logits,
            passenger_positions=state.passenger_positions,
            noise=noise,
            gumbel=gumbel,
        )

    def _proposed(self, context: Context) -> Tree:
        if self.drafter is not None and self.depth:
            return self.drafter.propose(context)
        return Tree(context.ids.gather(1, context.lengths[:, None] - 1), (-1,))

    def _logits(self, tree: Tree, state: State) -> Tensor:
        """At the nodes, and the passengers behind them. Strict passes have the same rows whatever was drafted: kernels
        round by shape."""
        last_start = self.wanted.longest - 1
        if tree.passengers is not None:
            tokens, depths, above = with_passengers(tree)
            return self.target.forward(tokens, state.starts, depths, above, last_start)
        if not tree.is_chain:
            return self.target.forward(tree.tokens, state.starts, tree.depths, tree.ancestors, last_start)
        if self.rule.strict_nodes is None:
            return self.target.chain(tree.tokens, state.starts, last_start, part=tree.rest)
        missing = self.rule.strict_nodes - tree.num_nodes
        padded = torch.cat([tree.tokens, tree.tokens[:, -1:].expand(-1, missing)], 1)
        return self.target.chain(padded, state.starts, last_start, strict=True)[:, : tree.num_nodes]

    def _verdict(self, tree: Tree, logits: Tensor, context: Context, state: State) -> Verdict:
        history, sampling = context.history, self.rule.sampling
        scores = logits if history is None else history.of_tree(tree, logits)
        scores = warp(scores, sampling, context.temperature)
        depth = tree.max_depth
        gumbel = context.gumbel if context.gumbel is None else context.gumbel[:, : depth + 1]
        return self.rule.verifier(Question(tree, scores, sampling, context.noise, state.positions(depth), gumbel))


def outcome(tensors: tuple[Tensor, ...]) -> Outcome:
    """What `Round.forward` returned, by name."""
    count = len(State._fields)
    report, *distance = tensors[count:]
    return Outcome(State(*tensors[:count]), report, distance[0] if distance else None)
