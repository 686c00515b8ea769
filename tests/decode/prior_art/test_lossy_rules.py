"""Four rules in use elsewhere as lossless, restated in a few lines, each with its exact distance from the target; ours
on the same toy has none. `pytest -s` prints the distances."""

from __future__ import annotations

import itertools

import torch

from decode.trees.tree import Tree, chain_parents
from decode.verify import block
from decode.verify.rejection import normalised
from tests.decode.distributions import (
    Context,
    Distribution,
    Toy,
    autoregressive,
    block_rule,
    delta_rule,
    distance,
    distance_from_target,
    rejection_rule,
    sequence_distribution,
)


def shown(name: str, lossy: float, ours: float) -> None:
    print(f"{name}: TV distance from the target {lossy:.4f}; here {ours:.1e}")  # noqa: T201
    assert lossy > 0.05
    assert ours < 1e-12


# match, then re-sample: REST, Medusa's nucleus mode, n-gram drafts of several repositories


def match_then_resample(toy: Toy, context: Context, drafted: int = 0, paths: int = 1) -> Distribution:
    """Each path that begins with the drafted token samples p and accepts on a match; if none does, p is sampled anew
    although the samples that did not match are known not to be the drafted token."""
    p = toy.p[context].tolist()
    refused = (1 - p[drafted]) ** paths
    distribution: Distribution = {(v,): refused * p[v] for v in range(len(p))}
    return distribution | {(drafted, v): (1 - refused) * p[v] for v in range(len(p))}


def test_match_then_resample() -> None:
    toy = Toy.constant([0.5, 0.3, 0.2], [0.6, 0.2, 0.2])
    ours = distance_from_target(toy, delta_rule((-1, 0), [0], parts=10), 3)
    shown("match, then re-sample", distance_from_target(toy, match_then_resample, 1), ours)
    toy = Toy.constant([0.4, 0.3, 0.3], [0.6, 0.2, 0.2])
    ours = distance_from_target(toy, delta_rule((-1, 0, 0, 0), [0, 0, 0], parts=10), 3)
    lossy = distance_from_target(toy, lambda toy, context: match_then_resample(toy, context, paths=3), 1)
    shown("match, then re-sample, three paths with one first token", lossy, ours)


# argmax drafts verified as if they had been sampled: transformers' single-position drafts with do_sample


def verified_as_if_sampled(toy: Toy, context: Context, drafted: int) -> Distribution:
    """Accept with min(1, p/q), else draw from (p - q)+, then one more token of p: right for a draft sampled from q."""
    p, q = toy.p[context], toy.q[context]
    accept = min(1.0, (p[drafted] / q[drafted]).item())
    left = (p - q).clamp(min=0)
    distribution: Distribution = {(v,): (1 - accept) * mass for v, mass in enumerate((left / left.sum()).tolist())}
    return distribution | {(drafted, v): accept * mass for v, mass in enumerate(p.tolist())}


def test_argmax_drafts_verified_as_if_sampled() -> None:
    toy = Toy.constant([0.2, 0.5, 0.3], [0.5, 0.3, 0.2])
    lossy = distance_from_target(toy, lambda toy, context: verified_as_if_sampled(toy, context, drafted=0), 1)
    ours = distance_from_target(toy, delta_rule((-1, 0), [0], parts=10), 3)
    shown("argmax drafts verified with q", lossy, ours)


# draft noise that is drawn once: Sequoia


def test_draft_noise_reused_in_every_round() -> None:
    """With the same noise every round drafts the same token: the first one of a round and that of the next repeat each
    other, although the rule gives each the target's distribution in a round by itself."""
    toy = Toy.constant([0.2, 0.5, 0.3], [0.25, 0.45, 0.3])
    joint: Distribution = {}
    for drafted, mass in enumerate(toy.q[0, 0].tolist()):
        distribution = sequence_distribution(
            toy, lambda toy, context, x=drafted: verified_as_if_sampled(toy, context, x), 3
        )
        for tokens, more in distribution.items():
            joint[tokens] = joint.get(tokens, 0.0) + mass * more
    assert distance(_at(joint, 0), autoregressive(toy, (0, 0))) < 1e-12
    target, chain = sequence_distribution(toy, autoregressive, 3), rejection_rule((-1, 0), "iid")
    lossy = distance(_at(joint, 0, 2), _at(target, 0, 2))
    shown("draft noise of one round in all, two tokens", lossy, distance_from_target(toy, chain, 3))


def _at(distribution: Distribution, *positions: int) -> Distribution:
    """The joint distribution of some of the tokens."""
    marginal: Distribution = {}
    for tokens, mass in distribution.items():
        kept = tuple(tokens[position] for position in positions)
        marginal[kept] = marginal.get(kept, 0.0) + mass
    return marginal


# noise keyed by position alone, under a rule that looks ahead: block verification


def test_noise_keyed_by_position_biases_block_verification() -> None:
    """Rejection never looks at what lies behind the first refusal, so drafting it again with the same noise does no
    harm. A block is judged as a whole: the token that is drafted again has already had its say."""
    p, q, k, length = [0.36, 0.64], [0.64, 0.36], 2, 3
    joint: Distribution = {}
    for noise in itertools.product(range(2), repeat=length + k):
        mass = torch.tensor(q)[list(noise)].prod().item()
        for tokens, more in _emitted_with(p, q, noise, k, length).items():
            joint[tokens] = joint.get(tokens, 0.0) + mass * more
    toy = Toy.constant(p, q)
    lossy = distance(joint, sequence_distribution(toy, autoregressive, length))
    shown("draft noise keyed by position, block verification", lossy, distance_from_target(toy, block_rule(k), length))


def _emitted_with(p: list[float], q: list[float], noise: tuple[int, ...], k: int, length: int) -> Distribution:
    """Distribution of `length` tokens where position i is drafted as noise[i] in every round that reaches it."""
    if length <= 0:
        return {(): 1.0}
    distributions = [torch.tensor([[one] * (k + 1)], dtype=torch.float64).log() for one in (p, q)]
    plan = block.plan(
        Tree(torch.tensor([[0, *noise[:k]]]), chain_parents(k + 1), "iid", distributions[1]), distributions[0]
    )
    stop, joint, beyond = [1.0, *plan.stop[0].tolist()], {}, 1.0
    for accepted in range(k, -1, -1):
        for v, mass in enumerate(normalised(plan.residual[0, accepted]).tolist()):
            tokens = (*noise[:accepted], v)[:length]
            for rest, more in _emitted_with(p, q, noise[len(tokens) :], k, length - len(tokens)).items():
                joint[(*tokens, *rest)] = joint.get((*tokens, *rest), 0.0) + beyond * stop[accepted] * mass * more
        beyond *= 1 - stop[accepted]
    return joint
