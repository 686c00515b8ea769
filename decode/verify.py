"""The rules that decide which draft tokens stand. All are exact in law; `Coupled` is exact token for token.

| rule | proposals | law of the output | acceptance of a sampled chain |
|---|---|---|---|
| Greedy | any | argmax | argmaxes agree |
| Coupled | any | that of autoregressive sampling with the same seed, as an equality | at least (1 - TV) / (1 + TV) |
| Rejection | chains, drawn from q or arbitrary | p, in law | 1 - TV, the optimum for one token |

Coupled: the target's token is argmax(log p + G[row, position]); the child that equals it is accepted (Gumbel
coupling; Daliri, Musco and Suresh 2024 bound its acceptance). Rejection: Leviathan et al. 2023, Chen et al. 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode.house.errors import ConfigError
from decode.noise import Noise, Stream
from decode.sampling import Sampling
from decode.shapes import Shape, chain
from decode.tree import Drawn, Tree


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


@dataclass(frozen=True)
class Question:
    """What a verifier is asked: the target's scores at every node and the randomness of this round."""

    tree: Tree
    scores: Tensor
    """(B, N, V) warped scores of the target at each node (`sampling.warp`, processors applied)."""
    sampling: Sampling
    noise: Noise
    positions: list[list[int]]
    """(B, D + 1) absolute position of the token after depth 0, 1, ... D."""
    gumbel: Tensor | None
    """(B, D + 1, V) coupled noise at those positions; None when greedy."""
    round_index: int


class Verifier(Protocol):
    """A rule. `shares_noise`: drafts may be drawn with the coupled noise of the verdict."""

    shares_noise: bool

    def check(self, sampling: Sampling) -> None:
        """Raise ConfigError for a sampling the rule cannot treat exactly."""

    def drawn(self, shape: Shape, replacement: bool) -> Drawn:
        """How children must be drawn for this plan; ConfigError where the rule has no exact way."""
        ...

    def __call__(self, question: Question) -> Verdict: ...


class Coupled:
    """Accept the child that equals the token which autoregressive sampling with the same noise would emit."""

    shares_noise = True

    def check(self, sampling: Sampling) -> None:
        """Any sampling will do."""

    def drawn(self, shape: Shape, replacement: bool) -> Drawn:
        """Any tree will do, drawn in any way."""
        return "arbitrary"

    def __call__(self, question: Question) -> Verdict:
        choice = coupled_choice(question.scores, question.gumbel, question.tree)
        return follow(question.tree, choice)


class Greedy(Coupled):
    """Coupled without noise; refuses to be asked for anything but temperature 0."""

    def check(self, sampling: Sampling) -> None:
        """Temperature 0 only."""
        if not sampling.is_greedy:
            raise ConfigError(
                f"verifier=greedy compares argmaxes, which is exact at temperature 0 only, not at "
                f"{sampling.temperature}. "
                "Use verifier=coupled or verifier=rejection"
            )


class Rejection:
    """Accept a drafted x with probability min(1, p(x)/q(x)); else draw from the residual (p - q)+; chains only."""

    shares_noise = False

    def check(self, sampling: Sampling) -> None:
        """Any sampling will do: p is warped before the rule."""

    def drawn(self, shape: Shape, replacement: bool) -> Drawn:
        """Chains from q."""
        if shape != chain(shape.depth):
            raise ConfigError(
                f"verifier=rejection treats chains only, not {shape}. Use verifier=coupled, which is exact for every "
                "tree"
            )
        return "iid"

    def __call__(self, question: Question) -> Verdict:
        tree = question.tree
        if not tree.is_chain or tree.drawn == "swor":
            raise ConfigError(
                f"verifier=rejection treats chains only; this tree has parents {tree.parents}, drawn {tree.drawn}. "
                "Use verifier=coupled, which is exact for every tree"
            )
        plan = rejection_plan(_normalised(question), tree)
        return roll(plan, question)


VERIFIERS: dict[str, Verifier] = {"coupled": Coupled(), "greedy": Greedy(), "rejection": Rejection()}


def coupled_choice(scores: Tensor, gumbel: Tensor | None, tree: Tree) -> Tensor:  # (B, N, V) -> (B, N)
    """argmax(log p + G) at every node, G by the node's depth: normalising log p would shift all scores alike."""
    if gumbel is None:
        return scores.argmax(-1)
    if not tree.is_chain:
        depth = tree.depths.expand(scores.shape[0], -1)[..., None]
        gumbel = gumbel.gather(1, depth.expand(-1, -1, gumbel.shape[-1]))
    return (scores + gumbel).argmax(-1)


def follow(tree: Tree, choice: Tensor) -> Verdict:
    """Walk from pending to the child that equals the chosen token, as long as there is one."""
    if tree.is_chain:
        return _follow_chain(tree, choice)
    batch = choice.shape[0]
    parents = tree.parent_ids
    node, alive = torch.zeros(batch, dtype=torch.long, device=choice.device), torch.ones(batch, dtype=torch.bool)
    path, tokens = [node], [choice[:, 0]]
    accepted, alive = torch.zeros_like(node), alive.to(choice.device)
    for _ in range(tree.max_depth):
        fits = (parents == node[:, None]) & (tree.tokens == tokens[-1][:, None]) & alive[:, None]
        alive = fits.any(-1)
        node = torch.where(alive, fits.to(torch.int8).argmax(-1), node)
        accepted = accepted + alive
        path.append(node)
        tokens.append(choice.gather(1, node[:, None])[:, 0])
    return Verdict(torch.stack(path, 1), accepted, torch.stack(tokens, 1))


def _follow_chain(tree: Tree, choice: Tensor) -> Verdict:
    accepted = (choice[:, :-1] == tree.tokens[:, 1:]).long().cumprod(-1).sum(-1)
    steps = torch.arange(tree.num_nodes, device=choice.device)
    return Verdict(torch.minimum(steps, accepted[:, None]), accepted, choice)


@dataclass(frozen=True)
class Plan:
    """The rule without its dice, so that tests can enumerate it: what is accepted when, and what is drawn otherwise."""

    p_drafted: Tensor
    """(B, k): p of each drafted token."""
    q_drafted: Tensor
    """(B, k): q of each drafted token; 1 where the draft is a point mass."""
    residual: Tensor
    """(B, k + 1, V): law of the token emitted after 0..k acceptances; the last is p itself."""

    @property
    def accept(self) -> Tensor:  # (B, k)
        """P(accept the i-th draft token | those before it were): `u * q < p` for a uniform u in [0, 1)."""
        return (self.p_drafted / self.q_drafted).clamp(max=1)


def rejection_plan(log_p: Tensor, tree: Tree) -> Plan:  # log_p (B, k + 1, V)
    """min(1, p/q) and the normalised (p - q)+; an arbitrary draft is a point mass q, which gives the delta rule."""
    p = log_p.exp()
    drafted = tree.tokens[:, 1:, None]
    if tree.drawn == "arbitrary" or tree.log_q is None:
        q = torch.zeros_like(p[:, :-1]).scatter_(-1, drafted, 1.0)
    else:
        q = tree.log_q[:, :-1].exp().to(p.dtype)
    residual = (p[:, :-1] - q).clamp(min=0)
    mass = residual.sum(-1, keepdim=True)
    # p == q leaves no residual; rejection then has probability 0 and the row is never drawn from, p keeps it a law
    residual = torch.where(mass > 0, residual / mass.clamp(min=torch.finfo(p.dtype).tiny), p[:, :-1])
    return Plan(
        p[:, :-1].gather(-1, drafted)[..., 0], q.gather(-1, drafted)[..., 0], torch.cat([residual, p[:, -1:]], dim=1)
    )


def accepts(u: Tensor, plan: Plan) -> Tensor:  # (B, k) -> (B, k) bool
    """Strict `u * q < p`: with `<=` a uniform of exactly 0 would accept a token of probability 0."""
    return u * plan.q_drafted < plan.p_drafted


def roll(plan: Plan, question: Question) -> Verdict:
    """Throw the dice of a plan."""
    tree, positions = question.tree, question.positions
    u = question.noise.fresh_uniform(Stream.ACCEPT, [row[:-1] for row in positions], question.round_index)
    accepted = accepts(u, plan).long().cumprod(-1).sum(-1)
    gumbel = question.noise.fresh_gumbel(Stream.RESIDUAL, positions, question.round_index)
    drawn = (plan.residual.log() + gumbel).argmax(-1)
    steps = torch.arange(tree.num_nodes, device=drawn.device)
    drafted = torch.cat([tree.tokens[:, 1:], drawn[:, -1:]], dim=1)
    tokens = torch.where(steps < accepted[:, None], drafted, drawn)
    return Verdict(torch.minimum(steps, accepted[:, None]), accepted, tokens)


def _normalised(question: Question) -> Tensor:
    if not question.sampling.is_greedy:
        return question.scores.log_softmax(-1)
    best = question.scores.argmax(-1, keepdim=True)
    return torch.full_like(question.scores, -torch.inf).scatter_(-1, best, 0.0)
