"""Typical acceptance (Medusa, Cai et al. 2024): a rule that changes the target's distribution, by a distance that is
measured.

A draft token c is accepted where p(c) > min(epsilon, delta exp(-H(p))), the likeliest such child where there are
several; where none is, and after the last accepted one, the token is argmax p, as in Medusa, whatever the temperature.
Chains are drafted from q, so temperature still has a say; trees hold the draft's likeliest tokens, and with them the
whole text is deterministic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decode.trees.tree import Drawn, Tree
from decode.verify.verdict import Question, Verdict, follow

if TYPE_CHECKING:
    from decode.trees.tree_plans import Shape

EPSILON, DELTA = 0.09, 0.3  # Medusa's defaults


class Typical:
    """More tokens stand, and the text is no longer the target's."""

    shares_noise = False

    def drawn(self, shape: Shape, replacement: bool) -> Drawn | None:
        """Chains from q, trees of the likeliest tokens."""
        if replacement:
            return None
        return "iid" if shape.is_chain else "arbitrary"

    def __call__(self, question: Question) -> Verdict:
        tree, p = question.tree, _law(question)
        floors = thresholds(p)
        choice = choose(p, floors, tree)
        verdict = follow(tree, choice[..., None], lambda rows, depths: rows[..., 0])
        distance = distances(p, floors, choice, tree).gather(1, verdict.path)
        return Verdict(verdict.path, verdict.num_accepted, verdict.tokens, distance)


def _law(question: Question) -> Tensor:
    if not question.sampling.is_greedy:
        return question.scores.softmax(-1)
    best = question.scores.argmax(-1, keepdim=True)
    return torch.zeros_like(question.scores).scatter_(-1, best, 1.0)


def thresholds(p: Tensor) -> Tensor:  # (B, N, V) -> (B, N)
    """min(epsilon, delta exp(-H(p))) at every node: always below the largest p."""
    entropy = torch.special.entr(p).sum(-1)
    return (DELTA * (-entropy).exp()).clamp(max=EPSILON)


def choose(p: Tensor, floors: Tensor, tree: Tree) -> Tensor:  # -> (B, N)
    """The token emitted after each node: its likeliest typical child, else argmax p."""
    best = p.argmax(-1)
    if tree.num_nodes == 1:
        return best
    parents, drafted = tree.parent_ids.expand(p.shape[0], -1)[:, 1:], tree.tokens[:, 1:]
    above = parents.clamp(min=0)
    p_drafted = p.flatten(1).gather(1, above * p.shape[-1] + drafted)
    typical = (p_drafted > floors.gather(1, above)) & (parents >= 0)
    nodes = torch.arange(tree.num_nodes, device=p.device)[None, :, None]
    worth = torch.where(typical[:, None] & (parents[:, None] == nodes), p_drafted[:, None], 0.0)  # (B, N, N - 1)
    most, child = worth.max(-1)
    return torch.where(most > 0, drafted.gather(1, child), best)


def distances(p: Tensor, floors: Tensor, choice: Tensor, tree: Tree) -> Tensor:  # -> (B, N)
    """TV between p and the exact distribution of the token emitted after each node, where drafts that were drawn are
    drawn anew.

    A chain's token follows q where q's draws are typical, and is argmax p otherwise; a node without children, and one
    whose children are no draws, emits one token for sure: 1 - p of it.
    """
    certain = 1 - p.gather(-1, choice[..., None])[..., 0]
    if tree.log_q is None or tree.drawn == "arbitrary" or not tree.is_chain or tree.num_nodes == 1:
        return certain
    inner = p[:, :-1]
    emitted = torch.where(inner > floors[:, :-1, None], tree.log_q[:, :-1].exp().to(p.dtype), 0.0)
    rest = (1 - emitted.sum(-1, keepdim=True)).clamp(min=0)
    emitted = emitted.scatter_add(-1, inner.argmax(-1, keepdim=True), rest)
    return torch.cat([(emitted - inner).abs().sum(-1) / 2, certain[:, -1:]], dim=1)
