"""Block verification of chains (Sun et al. 2024): the tokens of a draft are judged together, and more of them stand
than one by one.

With r_i = min(1, r_(i-1) p(x_i)/q(x_i)), r_0 = 1, a prefix of i < k tokens is a stop with probability
h_i = S_i / (S_i + 1 - r_i), S_i = sum_v (r_i p(v) - q(v))+ over the distributions after it, and the whole draft with
r_k. The longest stop wins; after i < k tokens the next is drawn from the normalised (r_i p - q)+.
P(at least i stand | x_1..x_i) is then r_i, the most that any rule can give.

Chains that were not sampled follow the delta rule of `rejection`, which is what the above becomes of a q of one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decode.common.errors import ConfigError
from decode.sampling.noise import Stream
from decode.trees.tree import Drawn, Tree
from decode.verify.rejection import delta
from decode.verify.verdict import Question, Verdict, Walk, at, end, follow

if TYPE_CHECKING:
    from decode.trees.tree_plans import Shape


class Block:
    """Chains."""

    shares_noise = False

    def drawn(self, shape: Shape, replacement: bool) -> Drawn | None:
        """Chains, independently."""
        return "iid" if shape.is_chain and not replacement else None

    def __call__(self, question: Question) -> Verdict:
        tree, scores = question.tree, question.scores
        if question.sampling.is_greedy:  # p is a point mass: what equals it stands
            return follow(tree, scores, lambda rows, depths: rows.argmax(-1))
        if not tree.is_chain:
            raise ConfigError(
                f"verifier=block takes chains; this drafter proposes parents {tree.parents}. Use verifier=coupled, "
                "which is exact for any proposal"
            )
        if tree.num_nodes > 1 and (tree.drawn == "arbitrary" or tree.log_q is None):
            return delta(tree, scores, question.uniforms(Stream.ACCEPT, range(tree.num_nodes)))
        walked = walk(tree, plan(tree, scores), question.uniforms(Stream.ACCEPT, range(1, tree.num_nodes)))
        return end(tree, walked, question)


@dataclass(frozen=True)
class BlockPlan:
    """The rule without its dice, so that tests can enumerate it."""

    stop: Tensor
    """(B, k): h_1 ... h_k."""
    residual: Tensor
    """(B, k + 1, V) mass, not normalised, of the token after 0..k accepted ones."""


def plan(tree: Tree, scores: Tensor) -> BlockPlan:
    """h and the residuals of chains drawn from tree.log_q, for the target's warped scores (B, k + 1, V)."""
    p, drafted = scores.softmax(-1), tree.tokens[:, 1:, None]
    if tree.num_nodes == 1:
        return BlockPlan(p[:, :0, 0], p)
    assert tree.log_q is not None
    q = tree.log_q[:, :-1].exp().to(p.dtype)
    tiny = torch.finfo(p.dtype).tiny
    ratio = p[:, :-1].gather(-1, drafted) / q.gather(-1, drafted).clamp(min=tiny)
    reached = running_minimum(ratio[..., 0])
    before = torch.cat([torch.ones_like(reached[:, :1]), reached[:, :-1]], dim=1)
    left = (before[..., None] * p[:, :-1] - q).clamp(min=0)
    mass = left.sum(-1)  # S_0 ... S_(k-1)
    inner = mass[:, 1:] / (mass[:, 1:] + 1 - reached[:, :-1]).clamp(min=tiny)
    # nothing is left after the prefix only if the next token stands for sure: any distribution will do there
    residual = torch.where(mass[..., None] > 0, left, p[:, :-1])
    return BlockPlan(torch.cat([inner, reached[:, -1:]], dim=1), torch.cat([residual, p[:, -1:]], dim=1))


def running_minimum(ratio: Tensor) -> Tensor:  # (B, k) -> (B, k)
    """r_i = min(1, r_(i-1) p/q)."""
    reached = [torch.ones_like(ratio[:, 0])]
    for one in ratio.unbind(-1):
        reached.append((reached[-1] * one).clamp(max=1))
    return torch.stack(reached[1:], dim=1)


def walk(tree: Tree, plan: BlockPlan, u: Tensor) -> Walk:
    """Throw the dice: u (B, k) decides on the stops, and the last one that is taken stands."""
    steps = torch.arange(tree.num_nodes, device=u.device)
    stops = torch.nn.functional.pad(u < plan.stop, (1, 0), value=True)  # after pending, if nowhere else
    accepted = torch.where(stops, steps, 0).amax(-1)
    return Walk(torch.minimum(steps, accepted[:, None]), accepted, at(plan.residual, accepted))
