"""The exact distribution of what a verifier emits on a toy: every draft, throw of the dice and round enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.trees.tree import Drawn, Tree, chain_parents, tree_depths
from decode.verify import block, rejection, verdict

Distribution = dict[tuple[int, ...], float]
Context = tuple[int, int]
Rule = Callable[["Toy", Context], Distribution]
"""Distribution of the tokens that one round emits after a context."""


@dataclass(frozen=True)
class Toy:
    """Distributions p and q (V, V, V) of the next token given the last two, fp64."""

    p: Tensor
    q: Tensor

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.p.shape[0]

    @classmethod
    def random(cls, vocab_size: int, seed: int, missing: int = 0) -> Toy:
        """Distributions far from each other and from uniform; each lacks `missing` tokens."""
        generator = torch.Generator().manual_seed(seed)
        return cls(_distributions(vocab_size, generator, missing), _distributions(vocab_size, generator, missing))

    @classmethod
    def constant(cls, p: list[float], q: list[float]) -> Toy:
        """The same distributions after every context."""
        return cls(*(torch.tensor(one, dtype=torch.float64).expand(len(p), len(p), -1) for one in (p, q)))


def _distributions(vocab_size: int, generator: torch.Generator, missing: int) -> Tensor:
    shape = (vocab_size, vocab_size, vocab_size)
    distributions = torch.rand(shape, generator=generator, dtype=torch.float64) ** 3 + 1e-3
    gone = torch.rand(shape, generator=generator).argsort(-1)[..., :missing]
    distributions.scatter_(-1, gone, 0.0)
    return distributions / distributions.sum(-1, keepdim=True)


def sequence_distribution(toy: Toy, rule: Rule, length: int) -> Distribution:
    """Distribution of the first `length` tokens of the generation loop, over as many rounds as it takes."""
    rounds = {(a, b): rule(toy, (a, b)) for a in range(toy.vocab_size) for b in range(toy.vocab_size)}

    def rest(context: Context, left: int) -> Distribution:
        distribution: Distribution = {}
        for emitted, mass in rounds[context].items():
            taken = emitted[:left]
            after = (*context, *taken)[-2:]
            tails = rest((after[0], after[1]), left - len(taken)) if len(taken) < left else {(): 1.0}
            for tail, more in tails.items():
                distribution[(*taken, *tail)] = distribution.get((*taken, *tail), 0.0) + mass * more
        return distribution

    return rest((0, 0), length)


def autoregressive(toy: Toy, context: Context) -> Distribution:
    """A token of p: what every rule is compared with."""
    return {(v,): toy.p[context][v].item() for v in range(toy.vocab_size)}


def distance(one: Distribution, other: Distribution) -> float:
    """Total variation."""
    return sum(abs(one.get(x, 0.0) - other.get(x, 0.0)) for x in {*one, *other}) / 2


def distance_from_target(toy: Toy, rule: Rule, length: int) -> float:
    """TV distance between the distribution of `length` emitted tokens and the target's."""
    return distance(sequence_distribution(toy, rule, length), sequence_distribution(toy, autoregressive, length))


# one round of our rules


def rejection_rule(parents: tuple[int, ...], drawn: Drawn, rows_differ: bool = False) -> Rule:
    """Rejection on trees of this shape whose children were drawn from q."""

    def rule(toy: Toy, context: Context) -> Distribution:
        tree, scores, weight = drafts(toy, context, parents, drawn)
        return rejected(_as_rows(tree) if rows_differ else tree, parents, scores, weight)

    return rule


def rejected(tree: Tree, parents: tuple[int, ...], scores: Tensor, weight: Tensor) -> Distribution:
    """What rejection emits of these trees, one of which is drawn with chances `weight` (B,)."""
    bits, chance = _dice(_acceptances(tree, parents, scores))
    rows, weight = len(weight), weight[:, None] * chance
    many = _repeated(tree, bits.shape[0])
    u = torch.where(bits, 0.0, 1 - 2.0**-53).repeat(rows, 1).double()
    walked = rejection.walk(many, scores.repeat_interleave(bits.shape[0], 0), u)
    return emitted(many, walked, weight.flatten())


def block_rule(k: int) -> Rule:
    """Block verification of chains of k tokens."""

    def rule(toy: Toy, context: Context) -> Distribution:
        return blocked(*drafts(toy, context, chain_parents(k + 1), "iid"))

    return rule


def blocked(tree: Tree, scores: Tensor, weight: Tensor) -> Distribution:
    """What block verification emits of these chains."""
    bits, chance = _dice(block.plan(tree, scores).stop)
    many = _repeated(tree, bits.shape[0])
    u = torch.where(bits, 0.0, 1 - 2.0**-53).repeat(len(weight), 1).double()
    plan = block.plan(many, scores.repeat_interleave(bits.shape[0], 0))
    return emitted(many, block.walk(many, plan, u), (weight[:, None] * chance).flatten())


def stopping_rule(k: int, length: Callable[[tuple[int, ...]], int], in_blocks: bool = False) -> Rule:
    """Rejection or block verification of chains that are cut to `length(drafted)` of k drafted tokens."""

    def rule(toy: Toy, context: Context) -> Distribution:
        tree, scores, weight = drafts(toy, context, chain_parents(k + 1), "iid")
        lengths = torch.tensor([length(tuple(row[1:])) for row in tree.tokens.tolist()])
        distribution: Distribution = {}
        for n in lengths.unique().tolist():
            chosen = lengths == n
            assert tree.log_q is not None
            cut = Tree(tree.tokens[chosen, : n + 1], chain_parents(n + 1), "iid", tree.log_q[chosen, : n + 1])
            seen, mass = scores[chosen, : n + 1], weight[chosen]
            part = blocked(cut, seen, mass) if in_blocks and n else rejected(cut, chain_parents(n + 1), seen, mass)
            distribution |= {tokens: distribution.get(tokens, 0.0) + more for tokens, more in part.items()}
        return distribution

    return rule


def delta_rule(parents: tuple[int, ...], drafted: list[int], parts: int, rows_differ: bool = False) -> Rule:
    """The delta rule on one given tree; every probability of p must be a multiple of 1 / parts, so that a grid of
    uniforms is their distribution."""

    def rule(toy: Toy, context: Context) -> Distribution:
        depth = max(tree_depths(parents))
        grid = (torch.arange(parts, dtype=torch.float64) + 0.5) / parts
        u = torch.cartesian_prod(*[grid] * (depth + 1)).view(-1, depth + 1)
        tokens = torch.tensor([[0, *drafted]]).expand(len(u), -1)
        tree = Tree(tokens, parents, "arbitrary")
        scores = toy.p[_contexts(tokens, parents, context)].log()
        told = rejection.delta(_as_rows(tree) if rows_differ else tree, scores, u)
        return _counted(told, torch.full((len(u),), 1 / len(u), dtype=torch.float64))

    return rule


def drafts(toy: Toy, context: Context, parents: tuple[int, ...], drawn: Drawn) -> tuple[Tree, Tensor, Tensor]:
    """Every tree that can be drawn, the target's scores (B, N, V) at its nodes, and the probability (B,) of each."""
    count, vocab = len(parents), toy.vocab_size
    tokens = torch.tensor([[0, *x] for x in itertools.product(range(vocab), repeat=count - 1)])
    contexts = _contexts(tokens, parents, context)
    q = toy.q[contexts]
    left, weight = q.clone(), torch.ones(len(tokens), dtype=torch.float64)
    for node in range(1, count):
        own, x = left[:, parents[node]], tokens[:, node : node + 1]
        mass = own.sum(-1)
        # no token is left to draw: whatever fills the place must not matter, so take one that q forbids
        filler = (q[:, parents[node]].argmin(-1) == x[:, 0]).double()
        weight = weight * torch.where(mass > 0, own.gather(-1, x)[:, 0] / mass.clamp(min=1e-300), filler)
        if drawn == "swor":
            left[:, parents[node]] = own.scatter(-1, x, 0.0)
    keep = weight > 0
    tree = Tree(tokens[keep], parents, drawn, q[keep].log())
    return tree, toy.p[contexts][keep].log(), weight[keep]


def _contexts(tokens: Tensor, parents: tuple[int, ...], context: Context) -> tuple[Tensor, Tensor]:
    """Indices (B, N) twice: the last two tokens at every node, for a table (V, V, V)."""
    before, last = [torch.full_like(tokens[:, 0], context[0])], [torch.full_like(tokens[:, 0], context[1])]
    for node in range(1, len(parents)):
        before.append(last[parents[node]])
        last.append(tokens[:, node])
    return torch.stack(before, 1), torch.stack(last, 1)


def _acceptances(tree: Tree, parents: tuple[int, ...], scores: Tensor) -> Tensor:
    """(B, N - 1): probability that each node is accepted once it is tried."""
    table, _ = verdict.child_table(parents, torch.device("cpu"))
    children, present = table.clamp(min=0), (table >= 0).expand(len(scores), -1, -1)
    drafted = tree.tokens[:, children.flatten()].view(len(scores), *children.shape)
    assert tree.log_q is not None
    plan = rejection.node_plan(scores.exp(), tree.log_q.exp(), drafted, present, tree.drawn == "swor")
    accept = torch.zeros(tree.tokens.shape, dtype=torch.float64)
    for node, rank in (table >= 0).nonzero().tolist():
        accept[:, table[node, rank]] = plan.accept[:, node, rank]
    return accept[:, 1:]


def _dice(accept: Tensor) -> tuple[Tensor, Tensor]:
    """All outcomes (2^n, n) of n throws, and the chance (B, 2^n) of each for success probabilities (B, n)."""
    bits = torch.tensor(list(itertools.product((False, True), repeat=accept.shape[1])), dtype=torch.bool)
    return bits, torch.where(bits, accept[:, None], 1 - accept[:, None]).prod(-1)


def _repeated(tree: Tree, times: int) -> Tree:
    assert tree.log_q is not None
    parents = tree.parents.repeat_interleave(times, 0) if isinstance(tree.parents, Tensor) else tree.parents
    tokens, log_q = tree.tokens.repeat_interleave(times, 0), tree.log_q.repeat_interleave(times, 0)
    return Tree(tokens, parents, tree.drawn, log_q, tree.depth_bound)


def _as_rows(tree: Tree) -> Tree:
    """The same trees, told row by row."""
    parents = torch.tensor([tree.parents]).expand(len(tree.tokens), -1)
    return Tree(tree.tokens, parents, tree.drawn, tree.log_q, tree.max_depth)


def emitted(tree: Tree, walked: rejection.Walk, weight: Tensor) -> Distribution:
    """Distribution of the emitted tokens, the last draw enumerated."""
    distribution, last_distribution = {}, rejection.normalised(walked.residual)
    for v in range(last_distribution.shape[1]):
        last = torch.full_like(walked.accepted, v)
        told = verdict.stopped(tree, walked.path, walked.accepted, last)
        for tokens, mass in _counted(told, weight * last_distribution[:, v]).items():
            distribution[tokens] = distribution.get(tokens, 0.0) + mass
    return distribution


def _counted(told: verdict.Verdict, weight: Tensor) -> Distribution:
    distribution: Distribution = {}
    for accepted in range(told.tokens.shape[1]):
        rows = (told.num_accepted == accepted) & (weight > 0)
        tokens, which = told.tokens[rows, : accepted + 1].unique(dim=0, return_inverse=True)
        masses = torch.zeros(len(tokens), dtype=torch.float64).index_add_(0, which, weight[rows])
        distribution |= {tuple(x): mass for x, mass in zip(tokens.tolist(), masses.tolist(), strict=True)}
    return distribution
