"""Rejection sampling on chains and trees (Leviathan et al. 2023, Chen et al. 2023; trees: Miao et al. 2024 with
replacement, Jeon et al. 2024 and Chen et al. 2024 without).

At a node the children are tried by their numbers, the order in which they were drawn. A child x, drawn from q, is
accepted with probability min(1, p(x)/q(x)); after a refusal p becomes the normalised (p - q)+, and, where children are
drawn without replacement, q loses x and is normalised again. What is left of p after the last child is the distribution
of the token that ends the round.

Children that were not sampled ("arbitrary") follow the delta rule: accept x with probability p(x), else take x out of
p. Drawing one token from p and accepting the child that equals it gives the same distribution, and merges duplicates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decode.sampling.noise import Stream
from decode.trees.tree import Drawn, Tree
from decode.trees.tree_plans import Shape, Static
from decode.verify.verdict import Question, Verdict, Walk, at, children_of, draw, end, follow


class Rejection:
    """The best acceptance of one sampled token: 1 - TV(p, q); siblings get what is left."""

    shares_noise = False

    def drawn(self, shape: Shape, replacement: bool) -> Drawn | None:
        """Chains and, with `replacement`, trees are drawn independently from q, other static trees without
        replacement; nodes that are chosen by their values are not sampled any more."""
        if isinstance(shape, Static) and not shape.is_chain:
            return "iid" if replacement else "swor"
        if replacement:
            return None
        return "iid" if shape.is_chain else "arbitrary"

    def __call__(self, question: Question) -> Verdict:
        tree, scores = question.tree, question.scores
        if question.sampling.is_greedy:  # p is a point mass: the child that equals it stands, the others fall
            return follow(tree, scores, lambda rows, depths: rows.argmax(-1))
        if tree.drawn == "arbitrary" or tree.log_q is None:
            return delta(tree, scores, question.uniforms(Stream.ACCEPT, range(tree.max_depth + 1)))
        walked = walk(tree, scores, question.uniforms(Stream.ACCEPT, range(1, tree.num_nodes)))
        return end(tree, walked, question)


@dataclass(frozen=True)
class NodePlan:
    """The rule at a node without its dice, so that tests can enumerate it; R children, in their order."""

    p_drafted: Tensor
    """(..., R): what is left of p at each child once the ones before it were refused; 0 where there is no child."""
    q_drafted: Tensor
    """(..., R): q of each child, as it was drawn."""
    residual: Tensor
    """(..., V): distribution of the token that is emitted when all children are refused; p where there are none."""

    @property
    def accept(self) -> Tensor:  # (..., R)
        """P(accept the child | the ones before it were refused): `u * q < p` for a uniform u in [0, 1)."""
        return (self.p_drafted / self.q_drafted).clamp(max=1)


def node_plan(p: Tensor, q: Tensor, drafted: Tensor, present: Tensor, without_replacement: bool) -> NodePlan:
    """The rule at nodes with distributions p, q (..., V) and children `drafted` (..., R), where those `present` exist.

    A child outside q's support was never drawn (more children than tokens are asked for where a filter leaves few):
    it is not there.
    """
    p_drafted, q_drafted = [torch.zeros_like(p[..., :0])], [torch.ones_like(q[..., :0])]
    for child in drafted.unbind(-1):
        x, rank = child[..., None], len(p_drafted) - 1
        p_x, q_x = p.gather(-1, x), q.gather(-1, x)
        here = present[..., rank : rank + 1] & (q_x > 0)
        p_drafted.append(torch.where(here, p_x, 0.0))
        q_drafted.append(torch.where(here, q_x, 1.0))
        p = torch.where(here, _residual(p, q), p)
        if without_replacement and rank + 1 < drafted.shape[-1]:
            q = torch.where(here, normalised(q.scatter(-1, x, 0.0)), q)
    return NodePlan(torch.cat(p_drafted, -1), torch.cat(q_drafted, -1), p)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+; p where nothing is left: a refusal then has probability 0, and p keeps it a distribution."""
    left = (p - q).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, normalised(left), p)


def normalised(mass: Tensor) -> Tensor:  # (..., V) -> (..., V)
    """The distribution of this shape; zeros stay zeros."""
    return mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)


def accepts(u: Tensor, p_drafted: Tensor, q_drafted: Tensor) -> Tensor:  # all (..., R) -> (..., R) bool
    """Strict `u * q < p`: with `<=` a uniform of exactly 0 would accept a token of probability 0."""
    return u * q_drafted < p_drafted


def delta(tree: Tree, scores: Tensor, u: Tensor) -> Verdict:
    """Children that were not sampled: a token of p is drawn at each depth, u (B, D + 1); the child that equals it
    stands."""
    return follow(tree, scores, lambda rows, depths: draw(rows.softmax(-1), u[:, depths]))


def walk(tree: Tree, scores: Tensor, u: Tensor) -> Walk:
    """Throw the dice of sampled children: u (B, N - 1) decides on nodes 1, 2, ..."""
    return _walk_chain(tree, scores, u) if tree.is_chain else _walk_tree(tree, scores, u)


def _walk_chain(tree: Tree, scores: Tensor, u: Tensor) -> Walk:
    """All nodes at once, by one number of p and q each; the distributions themselves only where the walk stops."""
    assert tree.log_q is not None
    inner, drafted, k = scores[:, :-1], tree.tokens[:, 1:, None], tree.num_nodes - 1
    p_drafted = (inner.gather(-1, drafted) - inner.logsumexp(-1, keepdim=True)).exp()[..., 0]
    q_drafted = tree.log_q[:, :-1].gather(-1, drafted).exp()[..., 0]
    accepted = accepts(u, p_drafted, q_drafted).long().cumprod(-1).sum(-1)
    refused = tree.tokens.gather(1, (accepted + 1).clamp(max=k)[:, None])
    p, q = _laws_at(tree, scores, accepted)
    plan = node_plan(p, q, refused, (accepted < k)[:, None], False)
    steps = torch.arange(tree.num_nodes, device=scores.device)
    return Walk(torch.minimum(steps, accepted[:, None]), accepted, plan.residual)


def _laws_at(tree: Tree, scores: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:  # two of (B, V)
    assert tree.log_q is not None
    return at(scores, node).softmax(-1), at(tree.log_q, node).exp().to(scores.dtype)


def _walk_tree(tree: Tree, scores: Tensor, u: Tensor) -> Walk:
    """Down from pending, level by level: only nodes on the path are planned."""
    node = torch.zeros(scores.shape[0], dtype=torch.long, device=scores.device)
    alive, accepted = torch.ones_like(node, dtype=torch.bool), torch.zeros_like(node)
    path, residual = [node], torch.zeros_like(scores[:, 0])
    for depth in range(tree.max_depth + 1):
        children, present = children_of(tree, node, depth)
        p, q = _laws_at(tree, scores, node)
        plan = node_plan(p, q, tree.tokens.gather(1, children), present, tree.drawn == "swor")
        residual = torch.where(alive[:, None], plan.residual, residual)
        if depth < tree.max_depth:
            uniforms = u.gather(1, (children - 1).clamp(min=0))
            stands = accepts(uniforms, plan.p_drafted, plan.q_drafted) & alive[:, None]
            alive = stands.any(-1)
            chosen = children.gather(1, stands.to(torch.int8).argmax(-1, keepdim=True))[:, 0]
            node = torch.where(alive, chosen, node)
            accepted = accepted + alive
            path.append(node)
    return Walk(torch.stack(path, 1), accepted, residual)
