"""What a verifier is asked and what it answers, the walk down a tree that every rule takes, and the two rules that are
nothing but it: coupled noise, and argmaxes at temperature 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from decode.sampling.noise import Noise, Stream
from decode.sampling.warp import Sampling
from decode.trees.tree import Drawn, Tree, tree_depths

if TYPE_CHECKING:
    from decode.trees.tree_plans import Shape

Pick = Callable[[Tensor, slice], Tensor]
"""(scores (B, n, V) of nodes, their depths) -> (B, n) the token that the target wants after each."""


@dataclass(frozen=True)
class Verdict:
    """What one round decides for each row."""

    path: Tensor
    """(B, D + 1) int64: node ids from pending down the accepted path; entries after the accepted ones repeat the
    last."""
    num_accepted: Tensor
    """(B,) int64: draft tokens accepted."""
    tokens: Tensor
    """(B, D + 1) int64: accepted tokens, then the correction or bonus token at index num_accepted; the rest is
    undefined."""
    distance: Tensor | None = None
    """(B, D + 1): TV distance between p and the distribution that each of `tokens` came from; None where it is 0 by
    proof."""


@dataclass(frozen=True)
class Question:
    """What a verifier is asked: the target's scores at every node and the randomness of this round."""

    tree: Tree
    scores: Tensor
    """(B, N, V) warped scores of the target at each node (`sampling.warp`, processors applied)."""
    sampling: Sampling
    noise: Noise
    """Of this round."""
    positions: Tensor
    """(B, D + 1) absolute position of the token after depth 0, 1, ... D."""
    gumbel: Tensor | None
    """(B, D + 1, V) coupled noise at those positions; None when greedy."""

    def uniforms(self, stream: Stream, draws: range) -> Tensor:  # (B, len(draws)) fp64
        """Numbers of this round, read once: `draws` are node ids, or depths."""
        every = torch.arange(draws.start, draws.stop, device=self.positions.device)
        return self.noise.fresh_uniform(stream, self.positions[:, :1].expand(-1, len(draws)), every)


class Verifier(Protocol):
    """A rule. `shares_noise`: drafts may be drawn with the coupled noise of the verdict."""

    shares_noise: bool

    def drawn(self, shape: Shape, replacement: bool) -> Drawn | None:
        """How children must be drawn for this plan; None where the rule has no exact way (`SamplingConfig` says why to
        people)."""
        ...

    def __call__(self, question: Question) -> Verdict: ...


def follow(tree: Tree, scores: Tensor, pick: Pick) -> Verdict:
    """Walk from pending to the child that equals the token the target wants, as long as there is one.

    Exact for children of any origin, duplicates included, as long as `pick` does not depend on them.
    """
    if tree.is_chain:
        return _follow_chain(tree, pick(scores, slice(0, tree.num_nodes)))
    node = torch.zeros(scores.shape[0], dtype=torch.long, device=scores.device)
    alive, accepted = torch.ones_like(node, dtype=torch.bool), torch.zeros_like(node)
    path, tokens, parents = [node], [], tree.parent_ids
    for depth in range(tree.max_depth + 1):
        tokens.append(pick(at(scores, node)[:, None], slice(depth, depth + 1))[:, 0])
        if depth < tree.max_depth:
            fits = (parents == node[:, None]) & (tree.tokens == tokens[-1][:, None]) & alive[:, None]
            alive = fits.any(-1)
            node = torch.where(alive, fits.to(torch.int8).argmax(-1), node)
            accepted = accepted + alive
            path.append(node)
    return Verdict(torch.stack(path, 1), accepted, torch.stack(tokens, 1))


def _follow_chain(tree: Tree, choice: Tensor) -> Verdict:
    accepted = (choice[:, :-1] == tree.tokens[:, 1:]).long().cumprod(-1).sum(-1)
    steps = torch.arange(tree.num_nodes, device=choice.device)
    return Verdict(torch.minimum(steps, accepted[:, None]), accepted, choice)


class Coupled:
    """Accept the child that equals the token which autoregressive sampling with the same noise would emit."""

    shares_noise = True

    def drawn(self, shape: Shape, replacement: bool) -> Drawn | None:
        """Any tree will do, drawn in any way: the draft's best by the shared noise, which differ."""
        return None if replacement else "arbitrary"

    def __call__(self, question: Question) -> Verdict:
        gumbel = question.gumbel
        if gumbel is None:
            return follow(question.tree, question.scores, lambda rows, depths: rows.argmax(-1))
        # normalising log p would shift all scores alike
        return follow(question.tree, question.scores, lambda rows, depths: (rows + gumbel[:, depths]).argmax(-1))


def stopped(tree: Tree, path: Tensor, accepted: Tensor, last: Tensor) -> Verdict:
    """The verdict of a walk that accepted `accepted` (B,) nodes of `path` (B, D + 1) and then drew `last` (B,)."""
    drafted = torch.cat([tree.tokens.gather(1, path[:, 1:]), last[:, None]], dim=1)
    steps = torch.arange(path.shape[1], device=path.device)
    return Verdict(path, accepted, torch.where(steps < accepted[:, None], drafted, last[:, None]))


@dataclass(frozen=True)
class Walk:
    """How far the dice went: all that is left is one draw."""

    path: Tensor
    """(B, D + 1) as in a verdict."""
    accepted: Tensor
    """(B,) int64."""
    residual: Tensor
    """(B, V): distribution of the token that ends the round, up to a factor."""


def end(tree: Tree, walked: Walk, question: Question) -> Verdict:
    """Draw the token that ends the round, once in a row: every round stops somewhere."""
    last = draw(walked.residual, question.uniforms(Stream.RESIDUAL, range(1))[:, 0])
    return stopped(tree, walked.path, walked.accepted, last)


def at(values: Tensor, node: Tensor) -> Tensor:  # (B, N, V), (B,) -> (B, V)
    """The row of each batch element's own node."""
    return values[torch.arange(values.shape[0], device=values.device), node]


def draw(p: Tensor, u: Tensor) -> Tensor:  # (..., V), (...) fp64 -> (...)
    """The token whose stretch of the cumulated distribution holds u; the distribution may be unnormalised.

    One uniform instead of a Gumbel number per token: noise for every node and token cost more than the rest of the
    verdict. A token of mass 0 is never drawn, however a device rounds its sums.
    """
    summed = p.double().cumsum(-1)
    mark = u.clamp(max=1 - 2.0**-53)[..., None] * summed[..., -1:]
    return ((summed > mark) & (p > 0)).to(torch.int8).argmax(-1)


def children_of(tree: Tree, node: Tensor, depth: int) -> tuple[Tensor, Tensor]:  # (B, R) ids, (B, R) bool
    """Children of each row's node of this depth in their order, and which of them exist; R is 0 at the deepest."""
    if isinstance(tree.parents, Tensor):
        names = torch.arange(tree.num_nodes, device=node.device)
        own = torch.where(tree.parents == node[:, None], names, tree.num_nodes).sort(-1).values[:, :-1]
        return own.clamp(max=tree.num_nodes - 1), own < tree.num_nodes
    table, widths = child_table(tree.parents, node.device)
    own = table[node][:, : widths[depth]]
    return own.clamp(min=0), own >= 0


@cache
def child_table(parents: tuple[int, ...], device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """((N, R) children of each node, -1 behind the last one; the most children of a node at each depth)."""
    children = [[child for child, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
    depths = tree_depths(parents)
    widths = [0] * (max(depths) + 1)
    for node, depth in enumerate(depths):
        widths[depth] = max(widths[depth], len(children[node]))
    padded = [own + [-1] * (max(widths) - len(own)) for own in children]
    return torch.tensor(padded, dtype=torch.long, device=device).view(len(parents), max(widths)), tuple(widths)
