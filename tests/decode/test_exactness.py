"""Exactness first: the rules' distributions enumerated, coupled output, the audit of the cache, strict=True in
bfloat16; and rules in use elsewhere as lossless, with their exact distance from the target (`pytest -s` prints it)."""

from __future__ import annotations

import itertools

import pytest
import torch

from decode.api import generate
from decode.common.errors import ConfigError
from decode.drafters.lm import LMDraft
from decode.forward.target import CachedModel
from decode.sampling.config import SamplingConfig
from decode.trees.tree import Tree, chain_parents
from decode.verify import block
from decode.verify.rejection import normalised
from tests.decode import checks
from tests.decode.checks import both_ways
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
from tests.tiers import by_default
from tests.tiny import MODELS, tiny_llama

SIMPLE = [
    checks.check_block_accepts_more,
    checks.check_delta_distribution,
    checks.check_drafts_follow_their_distribution,
    checks.check_draws,
    checks.check_end_of_text,
    checks.check_long_context,
    checks.check_more_siblings_than_tokens,
    checks.check_noise_is_read_once,
    checks.check_processors,
    checks.check_sliding_window,
    checks.check_streams_differ,
    checks.check_typical_distance,
    checks.check_zero_probability_never_accepted,
    # over a second each
    checks.check_batches,
    checks.check_perfect_draft,
    checks.check_siblings_have_numbers_of_their_own,
]


@pytest.mark.parametrize("check", by_default(13, SIMPLE), ids=lambda check: check.__name__)
def test_property_holds(check) -> None:  # noqa: ANN001
    check()


@pytest.mark.parametrize("name", checks.DISTRIBUTIONS)
def test_rule_has_the_distribution_of_the_target(name: str) -> None:
    checks.check_distribution(name)


def test_delta_rule_is_exact_where_rows_have_trees_of_their_own() -> None:
    checks.check_delta_distribution(rows_differ=True)


@pytest.mark.parametrize("kind", ["oracle", "tree"])
@pytest.mark.parametrize("temperature", by_default(1, [1.0, 0.0]))
def test_every_acceptance_length_rolls_back_right(kind: str, temperature: float) -> None:
    checks.check_oracle(kind, temperature=temperature)


@pytest.mark.parametrize("kind", ["oracle", "tree"])
def test_cache_holds_exactly_the_committed_tokens(kind: str) -> None:
    checks.check_cache(kind)


@pytest.mark.parametrize("verifier", by_default(1, ["rejection", "block", "coupled"]))
def test_tokens_outside_the_support_are_never_emitted(verifier: str) -> None:
    checks.check_filtered_tokens_never_emitted(verifier)


def test_block_verification_reads_no_number_twice() -> None:
    checks.check_noise_is_read_once("block")


def test_eager_attention_gets_an_additive_mask() -> None:
    """A boolean mask would be added as +1/0: greedy text then differs from transformers' own."""
    model = tiny_llama(attn_implementation="eager")
    ids, _ = checks.ragged_prompts(1)
    ours = checks.generate(model, None, ids, max_new_tokens=12, temperature=0, eos_token_id=())
    theirs = model.generate(ids, do_sample=False, max_new_tokens=12)  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    model = MODELS[name]()
    ids, _ = checks.ragged_prompts(1)
    ours = checks.generate(model, None, ids, max_new_tokens=16, temperature=0, eos_token_id=())
    theirs = model.generate(ids, do_sample=False, max_new_tokens=16, eos_token_id=None)  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs)


VOCAB, NODES = 256, 5


def target(num_layers: int = 2):
    shape = {"vocab_size": VOCAB, "hidden_size": 64, "num_heads": 4, "num_layers": num_layers}
    return tiny_llama(dtype=torch.bfloat16, max_position_embeddings=1024, **shape)


@pytest.mark.parametrize("length", [3, 250, 254])
def test_a_token_has_the_same_logits_at_every_place_of_a_pass(length: int) -> None:
    """Bit for bit, as row 0 (plain decoding) or row j, in passes that end before slot 256 or behind it."""
    model, batch = target(), 3
    ids = torch.randint(0, VOCAB, (batch, length + 2 * NODES), generator=torch.Generator().manual_seed(0))
    plain, drafted = CachedModel(model, batch, 600), CachedModel(model, batch, 600)
    logits = {}
    with torch.inference_mode():
        for runner in (plain, drafted):
            runner.prefill(ids, [0] * batch, [length] * batch)
        for at in range(length, length + NODES):  # one token a pass, the rest of it filler
            filler = ids[:, at : at + 1].expand(-1, NODES)
            logits[at] = plain.chain(filler, torch.full((batch, 1), at), at, strict=True)[:, 0]
        together = drafted.chain(ids[:, length : length + NODES], torch.full((batch, 1), length), length, strict=True)
    for j in range(NODES):
        assert torch.equal(logits[length + j], together[:, j]), f"row {j}"


@pytest.mark.parametrize("temperature", by_default(1, [1.0, 0.0]))
@pytest.mark.parametrize("batch", by_default(1, [3, 1]))
def test_strict_speculative_text_is_the_strict_plain_text_in_bf16(temperature: float, batch: int) -> None:
    """Two thousand tokens over the four cases, acceptance from 0 to k in turn, past the first bucket of the cache."""
    settings = {"temperature": temperature, "max_new_tokens": 260, "num_draft_tokens": 4, "strict": True}
    plain, speculative = both_ways(target(), "oracle", batch, **settings)
    assert torch.equal(plain.sequences, speculative.sequences)
    assert speculative.stats.num_target_passes < plain.stats.num_target_passes


@pytest.mark.slow
def test_strict_holds_when_waiting_requests_take_rows_at_other_times() -> None:
    model, draft = target(), LMDraft(target(num_layers=1))
    ids = torch.randint(0, VOCAB, (5, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[column >= 2 * row for column in range(12)] for row in range(5)]).long()
    settings = {
        "max_new_tokens": 40,
        "batch_size": 2,
        "strict": True,
        "seed": 0,
        "eos_token_id": tuple(range(0, VOCAB, 16)),
    }
    plain = generate(model, None, ids, mask, **settings)
    speculative = generate(model, draft, ids, mask, **settings)
    assert torch.equal(plain.sequences, speculative.sequences)
    assert len(set(plain.lengths.tolist())) > 1  # rows ended at different times


def test_both_loops_run_passes_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits on one machine may be luck; equal shapes are why they are equal on all."""
    shapes: list[tuple[object, ...]] = []
    run = CachedModel.run
    monkeypatch.setattr(CachedModel, "run", lambda self, key, *rest: shapes.append(key) or run(self, key, *rest))
    both_ways(target(), "oracle", 2, num_draft_tokens=3, max_new_tokens=30, strict=True)
    passes = {shape for shape in shapes if shape[0] == "straight" and isinstance(shape[1], int)}  # not while traced
    assert passes == {("straight", 4, 256, None)}  # nodes, slots in sight, all layers


def test_trees_are_refused() -> None:
    with pytest.raises(ConfigError, match="strict=true"):
        generate(target(), None, torch.tensor([[1, 2]]), tree="2x2", strict=True)
    with pytest.raises(ConfigError, match="tree=2x2"):
        SamplingConfig(tree="2x2", strict=True)
    assert SamplingConfig(tree="1x1", strict=True).strict


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
