"""Drafting a tree, level by level: plans known beforehand, and trees that follow the draft's confidence.

Only nodes that have children are read by the draft. They are numbered on their own, so that leaves leave no gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from decode.drafters.drafting import Above, DraftRound, Processed, Steps, Unit, pending_tokens, propose_chain
from decode.sampling.noise import Stream
from decode.sampling.warp import Sampling, warp
from decode.trees.tree import Drawn, Tree, ancestors, tree_depths
from decode.trees.tree_plans import Dynamic, Shape, Static

if TYPE_CHECKING:
    from decode.drafters.base import Context

DISAGREEMENT = 0.4
"""Scale in nats at which a draft's log-probabilities err. Chosen while building, on a few prompts of the toy's
pair, among 0.15, 0.35, 0.5 and 1 (which is EAGLE-2): flat between 0.35 and 0.5, worse at both ends."""


def propose(drafting: DraftRound, context: Context) -> Tree:
    """The chain or tree that `context.shape` plans."""
    return propose_chain(drafting, context) if context.drafts_chain else propose_tree(drafting, context)


def propose_tree(drafting: DraftRound, context: Context) -> Tree:
    """The tree that `context.shape` plans.

    One captured unit where nothing has to be asked between the levels: neither processors nor noise of the draft's own.
    """
    draws, shape = Draws.of(context), context.shape
    if draws.drawn == "arbitrary" and context.history is None:
        tokens, parents = _as_one_unit(drafting, context, draws)
        return _tree(tokens, parents, shape)
    steps = Processed(drafting.steps(), context, drafting.runner)
    tokens, parents, log_q = _grow(steps, draws, pending_tokens(context), shape)
    return _tree(tokens, parents, shape, draws.drawn, log_q)


def _tree(
    tokens: Tensor, parents: Tensor, shape: Shape, drawn: Drawn = "arbitrary", log_q: Tensor | None = None
) -> Tree:
    if isinstance(shape, Static):
        return Tree(tokens, shape.parents, drawn, log_q)
    return Tree(tokens, parents, depth_bound=shape.depth)


def _as_one_unit(drafting: DraftRound, context: Context, draws: Draws) -> tuple[Tensor, ...]:
    assert draws.temperature is not None
    given = (pending_tokens(context), draws.temperature)
    given = given if draws.gumbel is None else (*given, draws.gumbel)

    def make(unit: Unit) -> TreePass:
        return TreePass(unit, context.shape, draws.sampling, len(given))

    return drafting.run(("tree", context.shape, draws.sampling, draws.gumbel is None), make, given)


@dataclass(frozen=True)
class Draws:
    """How candidates are drawn in one round."""

    sampling: Sampling
    drawn: Drawn
    """At temperature 0 always `arbitrary`: draws from a point mass would all be the same."""
    gumbel: Tensor | None
    """(B, D + 1, V) noise of depths 0, 1, ... after pending where the verdict shares it."""
    fresh: Callable[[int, Tensor], Tensor] | None = None
    """(depth, node ids (n,)) -> (B, n, V): noise of the draft's own for tokens at depth + 1."""
    temperature: Tensor | None = None
    """(1,) in place of the sampling's own."""

    @classmethod
    def of(cls, context: Context) -> Draws:
        """Those that a context asks for."""

        def fresh(depth: int, draws: Tensor) -> Tensor:
            positions = (context.lengths + depth)[:, None].expand(-1, len(draws))
            return context.noise.fresh_gumbel(Stream.DRAFT, positions, draws)

        drawn: Drawn = "arbitrary" if context.sampling.is_greedy else context.drawn
        shared = context.gumbel  # of all levels that were asked for; a member of a mixture drafts fewer
        shared = None if shared is None else shared[:, : context.shape.depth + 1]
        return cls(context.sampling, drawn, shared, fresh, context.temperature)

    def with_shared_noise(self, scores: Tensor, depth: int) -> Tensor:
        """scores (B, S, V) of nodes of one depth, with the noise of the verdict on their children where it is
        shared."""
        return scores if self.gumbel is None else scores + self.gumbel[:, depth, None]


def _grow(steps: Steps, draws: Draws, pending: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor | None]:
    """(tokens (B, N), parents (B, N), log q) of a tree behind pending (B, 1)."""
    logits = steps.first()
    if isinstance(shape, Dynamic):
        return *_grow_dynamic(steps, draws, logits, pending, shape), None
    assert isinstance(shape, Static)
    tokens, log_q = _grow_static(steps, draws, logits, pending, shape.parents)
    return tokens, tokens.new_zeros(0), log_q


class TreePass(nn.Module):
    """A whole tree as one unit: tokens (B, N) and, where rows have trees of their own, parents (B, N)."""

    def __init__(self, unit: Unit, shape: Shape, sampling: Sampling, num_given: int) -> None:
        super().__init__()
        self.unit, self.shape, self.sampling, self.num_given = unit, shape, sampling, num_given
        self.written = unit.written

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        """pending (B, 1), temperature (1,), gumbel (B, D + 1, V) where it is shared, then the inputs of the unit."""
        pending, temperature, *gumbel = given[: self.num_given]
        steps = self.unit(*given[self.num_given :])
        draws = Draws(self.sampling, "arbitrary", gumbel[0] if gumbel else None, temperature=temperature)
        return _grow(steps, draws, pending, self.shape)[:2]


@dataclass(frozen=True)
class Level:
    """The children of one depth's inner nodes, in a plan that is the same in every row."""

    depth: int
    """Of the parents."""
    sources: Tensor
    """(S,) int64 ids of the parents: the inner nodes of this depth."""
    children: Tensor
    """(C,) int64 ids of the children, parent by parent."""
    owners: Tensor
    """(C,) int64: index of each child's parent in `sources`."""
    ranks: Tensor
    """(C,) int64: which candidate of its parent each child is."""
    width: int
    """Most children of one parent."""
    inner: Tensor
    """(W,) int64: index in `children` of those that have children themselves, which the draft reads next."""
    above: Above
    """Where those hang that are read next."""


@cache
def plan_levels(parents: tuple[int, ...], device: torch.device) -> list[Level]:
    """Index tensors of a static plan, made once: level d holds the children of depth d's inner nodes."""
    depths = tree_depths(parents)
    is_inner = [node in parents for node in range(len(parents))]
    read_order = [node for node in range(1, len(parents)) if is_inner[node]]
    above = ancestors(parents)
    levels = []
    for depth in range(max(depths)):
        sources = [node for node, at in enumerate(depths) if at == depth and is_inner[node]]
        children = [node for node, at in enumerate(depths) if at == depth + 1]
        owners = [sources.index(parents[node]) for node in children]
        ranks = [owners[:i].count(owner) for i, owner in enumerate(owners)]
        inner = [i for i, node in enumerate(children) if is_inner[node]]
        seen = [node for node in read_order if depths[node] <= depth + 1]
        visible = above[[children[i] for i in inner]][:, seen][None]
        with torch.inference_mode(mode=False):
            source_ids, child_ids, owner_ids, rank_ids, inner_ids = (
                torch.tensor(one, device=device).long() for one in (sources, children, owners, ranks, inner)
            )
            hanging = Above(visible.to(device), owner_ids[inner_ids][None])
        levels.append(Level(depth, source_ids, child_ids, owner_ids, rank_ids, max(ranks) + 1, inner_ids, hanging))
    return levels


def _grow_static(
    steps: Steps, draws: Draws, logits: Tensor, pending: Tensor, parents: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    plan = plan_levels(parents, pending.device)
    tokens, drawn_from = [pending], []
    for level in plan:
        candidates, source = _children(warp(logits, draws.sampling, draws.temperature), draws, level)
        tokens.append(candidates)
        drawn_from.append(source)
        if level is not plan[-1]:
            logits = steps.step(candidates[:, level.inner], level.depth + 1, level.above)
    log_q = None if draws.drawn == "arbitrary" else _log_q_of_nodes(drawn_from, plan, len(parents))
    return torch.cat(tokens, 1), log_q


def _children(scores: Tensor, draws: Draws, level: Level) -> tuple[Tensor, Tensor]:
    """Tokens (B, C) of a level's children from the warped scores (B, S, V) of their parents, and the distributions
    (B, S, V).

    A filter may leave fewer tokens than children are asked for. The rest have q = 0 and were not drawn from q: any
    token will do where candidates are arbitrary; of draws without replacement the rule reads it in the distribution,
    and passes them over.
    """
    if draws.drawn == "arbitrary":
        return _ranked(draws.with_shared_noise(scores, level.depth), level), scores
    log_q = scores.log_softmax(-1)
    assert draws.fresh is not None
    if draws.drawn == "iid":
        return (log_q[:, level.owners] + draws.fresh(level.depth, level.children)).argmax(-1), log_q
    return _ranked(log_q + draws.fresh(level.depth, level.sources), level), log_q


def _ranked(noisy: Tensor, level: Level) -> Tensor:  # (B, S, V) -> (B, C)
    """Each child the candidate of its rank; the last one again where the vocabulary has no more."""
    width = min(level.width, noisy.shape[-1])
    return noisy.topk(width).indices[:, level.owners, level.ranks.clamp(max=width - 1)]


def _log_q_of_nodes(drawn_from: list[Tensor], levels: list[Level], num_nodes: int) -> Tensor:  # (B, N, V)
    """The distributions of the inner nodes at their ids; leaves, which have no children, hold the uniform one."""
    batch, _, vocab_size = drawn_from[0].shape
    log_q = drawn_from[0].new_full((batch, num_nodes, vocab_size), -math.log(vocab_size))
    for level, source in zip(levels, drawn_from, strict=True):
        log_q[:, level.sources] = source
    return log_q


@dataclass(frozen=True)
class Candidates:
    """Nodes that a dynamic tree may keep, of one level or of all."""

    tokens: Tensor
    """(B, C) int64."""
    values: Tensor
    """(B, C): log of the estimated probability that the verdict gets here, a sum along the path."""
    parents: Tensor
    """(B, C) int64: number of the parent among all candidates, -1 for pending."""


def _grow_dynamic(steps: Steps, draws: Draws, logits: Tensor, pending: Tensor, shape: Dynamic) -> tuple[Tensor, Tensor]:
    """EAGLE-2 (Li et al. 2024): the draft reads the `beam` best candidates of a level; the best of all levels stay.

    Four are enough: with 16 nodes in 8 levels beams of 2, 3, 4 and 8 gave 4.3, 4.4, 4.5 and 4.5 tokens per pass.
    """
    value = torch.zeros_like(logits[..., 0])
    numbers = torch.full_like(value, -1, dtype=torch.long)
    visible = torch.zeros_like(logits[..., :0], dtype=torch.bool)
    found = []
    for depth in range(shape.depth):
        level = _candidates(logits, value, numbers, draws, depth, shape.beam)
        if depth + 1 < shape.depth:
            value, chosen = level.values.topk(min(shape.beam, level.values.shape[1]))
            numbers = chosen + sum(one.values.shape[1] for one in found)
            owners = chosen // (level.values.shape[1] // visible.shape[1])
            visible = _seen_by(owners, visible)
            logits = steps.step(level.tokens.gather(1, chosen), depth + 1, Above(visible, owners))
        found.append(level)
    every = Candidates(*(torch.cat([getattr(one, f.name) for one in found], 1) for f in fields(Candidates)))
    return _best_nodes(pending, every, shape)


def _candidates(logits: Tensor, value: Tensor, numbers: Tensor, draws: Draws, depth: int, beam: int) -> Candidates:
    """The `beam` best children of each of the nodes of one depth with these logits (B, W, V), values and numbers."""
    ranking = draws.with_shared_noise(warp(logits, draws.sampling, draws.temperature), depth)
    best = _log_chance(ranking, draws).topk(min(beam, ranking.shape[-1]))
    values = value[..., None] + best.values
    return Candidates(best.indices.flatten(1), values.flatten(1), numbers[..., None].expand_as(best.indices).flatten(1))


def _log_chance(ranking: Tensor, draws: Draws) -> Tensor:
    """Log of the estimated probability of each sibling to stand, from the scores that rank them; at most 0.

    Where the verdict's noise is shared, and at temperature 0, the target's choice is settled: it is the best of scores
    that differ from these by what target and draft disagree about. So the best candidate is the likelier the further
    ahead it lies, and its own log q says little. Of a token that is yet to be drawn, log q is all there is to know.
    """
    settled = draws.sampling.is_greedy or draws.gumbel is not None
    return (ranking / DISAGREEMENT if settled else ranking).log_softmax(-1).clamp(max=0)


def _seen_by(owners: Tensor, visible: Tensor) -> Tensor:  # (B, W), (B, W', M) -> (B, W, M + W)
    """A node sees what its parent sees, and itself; `owners` are indices of parents among the W' nodes before."""
    width = owners.shape[1]
    inherited = visible.gather(1, owners[..., None].expand(-1, -1, visible.shape[2]))
    own = torch.eye(width, dtype=torch.bool, device=owners.device).expand(len(owners), -1, -1)
    return torch.cat([inherited, own], 2)


def _best_nodes(pending: Tensor, found: Candidates, shape: Dynamic) -> tuple[Tensor, Tensor]:
    """The candidates of highest value, in the order of their numbers: level by level.

    No candidate is worth more than its parent, and of equals the earlier one goes first, so parents are kept too.
    """
    order = found.values.sort(dim=1, descending=True, stable=True).indices
    kept = order[:, : shape.num_nodes - 1].sort(1).values
    nodes = torch.arange(1, kept.shape[1] + 1, device=kept.device).expand_as(kept)
    node_of = torch.zeros_like(found.parents).scatter_(1, kept, nodes)
    above = found.parents.gather(1, kept)
    parents = torch.where(above < 0, 0, node_of.gather(1, above.clamp(min=0)))
    tokens = torch.cat([pending, found.tokens.gather(1, kept)], 1)
    root = torch.full_like(pending, -1)
    return tokens, torch.cat([root, parents], 1)
