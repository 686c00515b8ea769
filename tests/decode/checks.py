"""The properties of the decoder as functions: the tests call them as they are, and the mutants must make them fail."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel, RepetitionPenaltyLogitsProcessor
from transformers.cache_utils import DynamicLayer

from decode.api import Output, generate
from decode.drafters import drafting
from decode.drafters.base import Context, Drafter
from decode.drafters.lm import LMDraft
from decode.forward.kept.lease import Lease
from decode.loop import Loop
from decode.models.compatibility import cache_argument
from decode.requests import Request
from decode.sampling.noise import Noise, Stream
from decode.sampling.warp import Sampling
from decode.trees.tree import Tree
from decode.trees.tree_plans import Shape, chain, k_ary
from decode.verify import block, rejection, typical
from decode.verify.verdict import draw
from tests.decode.distributions import Rule, Toy, block_rule, delta_rule, distance_from_target, drafts, rejection_rule
from tests.decode.drafters import Oracle, OracleTree
from tests.tiny import MODELS, tiny_llama

VOCAB = 64
CPU = torch.device("cpu")
CHAIN = chain(4)


def ragged_prompts(batch: int, vocab_size: int = VOCAB, seed: int = 1) -> tuple[Tensor, Tensor]:
    """(ids, mask): `batch` prompts of 9, 8, 7, ... tokens, padded on the left."""
    ids = torch.randint(0, vocab_size, (batch, 9), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, :row] = 0
    return ids, mask


def unpadded(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The rows without their padding."""
    return [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]


def texts_of(out: Output, ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Prompt and completion of each row."""
    new = out.sequences[:, ids.shape[1] :].tolist()
    return [prompt + more for prompt, more in zip(unpadded(ids, mask), new, strict=True)]


def both_ways(model: PreTrainedModel, drafter: Drafter | str, batch: int, **settings: Any) -> tuple[Output, Output]:
    """Autoregressive and speculative output of the same call; "oracle" and "tree" know the autoregressive text."""
    ids, mask = ragged_prompts(batch, model.config.get_text_config().vocab_size)
    call = partial(generate, model, input_ids=ids, attention_mask=mask, **({"eos_token_id": (), "seed": 0} | settings))
    plain = call(None)
    if isinstance(drafter, str):
        kind = OracleTree if drafter == "tree" else Oracle
        drafter = kind(texts_of(plain, ids, mask), model.config.get_text_config().vocab_size)
    return plain, call(drafter)


def check_pathwise_equality(model: PreTrainedModel, drafter: Drafter | str, batch: int, **settings: Any) -> Output:
    """The speculative output is the autoregressive one, token for token."""
    plain, speculative = both_ways(model, drafter, batch, **settings)
    assert torch.equal(plain.sequences, speculative.sequences)
    assert speculative.stats.num_tokens == plain.stats.num_tokens
    return speculative


def check_oracle(kind: str = "oracle", batch: int = 3, temperature: float = 1.0) -> None:
    """Every acceptance length from 0 to k occurs, and the output is the autoregressive one."""
    model = tiny_llama(VOCAB, dtype=torch.float64)
    out = check_pathwise_equality(model, kind, batch, max_new_tokens=30, temperature=temperature, num_draft_tokens=4)
    lengths = {one.accepted for one in out.stats.rounds if one.drafted == 4}
    assert lengths == {0, 1, 2, 3, 4}


class RolledByPrefix(LogitsProcessor):
    """Shifts the vocabulary by the sum of the prefix: any token too many or too few changes everything."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """ids (rows, length), scores (rows, V)."""
        return torch.stack([row.roll(int(ids.sum())) for ids, row in zip(input_ids, scores, strict=True)])


def check_processors() -> None:
    """Processors see, at every node, the node's own prefix."""
    model = tiny_llama(VOCAB, dtype=torch.float64)
    for kind in ("oracle", "tree"):
        for processor in (RepetitionPenaltyLogitsProcessor(1.8), RolledByPrefix()):
            settings = {"max_new_tokens": 16, "num_draft_tokens": 3, "logits_processor": [processor]}
            check_pathwise_equality(model, kind, 2, **settings)


def check_end_of_text() -> None:
    """A row ends with the end token though the draft knew what would have followed."""
    model, (ids, mask) = tiny_llama(VOCAB, dtype=torch.float64), ragged_prompts(2)
    free = generate(model, None, ids, mask, max_new_tokens=24, eos_token_id=(), seed=0)
    texts = texts_of(free, ids, mask)
    for at in range(9, 9 + 12, 3):
        end = int(free.sequences[0, at])
        call = partial(generate, model, input_ids=ids, attention_mask=mask, max_new_tokens=24, eos_token_id=end, seed=0)
        plain, speculative = call(None), call(Oracle(texts, VOCAB))
        assert torch.equal(plain.lengths, speculative.lengths)
        assert torch.equal(plain.sequences, speculative.sequences)
        assert plain.stats.finish_reasons[0] == speculative.stats.finish_reasons[0] == "eos"


def check_long_context() -> None:
    """Text that grows past the slots of one bucket is that of transformers."""
    model = tiny_llama(VOCAB, dtype=torch.float64, max_position_embeddings=512)
    ids = torch.randint(0, VOCAB, (1, 250), generator=torch.Generator().manual_seed(2))
    want = model.generate(ids, do_sample=False, max_new_tokens=14).tolist()  # type: ignore[operator]
    for drafter in (None, Oracle(want, VOCAB), OracleTree(want, VOCAB)):
        rows, _ = audited_run(model, drafter, Request(ids.tolist(), 14, Sampling(0), shape=chain(4)))
        assert rows == want


def check_batches() -> None:
    """A request's text depends neither on the batch it came in, nor on the row it takes over from a finished one."""
    model, (ids, mask) = tiny_llama(VOCAB, dtype=torch.float64), ragged_prompts(3)
    together = generate(model, None, ids, mask, max_new_tokens=12, eos_token_id=(), seed=0)
    draft = LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))
    in_turn = generate(model, draft, ids, mask, max_new_tokens=12, eos_token_id=(), batch_size=2, seed=0)
    assert torch.equal(together.sequences, in_turn.sequences)
    for row in range(3):
        alone = generate(model, None, ids[row : row + 1, row:], max_new_tokens=12, rows=[row], eos_token_id=(), seed=0)
        assert torch.equal(alone.sequences[0, -12:], together.sequences[row, -12:])


def check_perfect_draft() -> None:
    """A draft that is the target is always right, in every row and for every request that a row takes over."""
    model, draft = (tiny_llama(VOCAB, dtype=torch.float64) for _ in range(2))  # one model would share its caches
    ids, mask = ragged_prompts(3)
    for tree in (None, "2x1x1"):
        settings = {"max_new_tokens": 16, "num_draft_tokens": 3, "tree": tree, "eos_token_id": (), "batch_size": 2}
        out = generate(model, LMDraft(draft), ids, mask, **settings)
        assert out.stats.tau == 4.0


DISTRIBUTIONS: dict[str, tuple[Rule, int]] = {
    "chain": (rejection_rule((-1, 0, 1), "iid"), 4),
    "long chain": (rejection_rule((-1, 0, 1, 2), "iid"), 5),
    "iid tree": (rejection_rule((-1, 0, 0, 1, 2), "iid"), 4),
    "iid siblings": (rejection_rule((-1, 0, 0, 0), "iid"), 4),
    "swor tree": (rejection_rule((-1, 0, 0, 1, 1), "swor"), 4),
    "swor siblings": (rejection_rule((-1, 0, 0, 0, 2), "swor"), 4),
    "swor rows": (rejection_rule((-1, 0, 0, 1, 1), "swor", rows_differ=True), 4),
    "block": (block_rule(2), 4),
    "long block": (block_rule(3), 5),
}
"""Sampled proposals, and how many tokens are emitted: more than one round gives."""


def check_distribution(name: str) -> None:
    """The enumerated distribution of several rounds' tokens is the product of p to 1e-12, where p has zeros as well."""
    rule, length = DISTRIBUTIONS[name]
    for seed in range(2):
        for missing in (0, 1):
            assert distance_from_target(Toy.random(3, seed, missing), rule, length) < 1e-12


def check_more_siblings_than_tokens() -> None:
    """Three children drawn from a q of two tokens, of four: the third was never drawn and must not stand."""
    rule = rejection_rule((-1, 0, 0, 0), "swor")
    assert distance_from_target(Toy.random(4, 0, missing=2), rule, 2) < 1e-12


def check_delta_distribution(rows_differ: bool = False) -> None:
    """The same for candidates that were not sampled, duplicates among them; each tree must be exact by itself."""
    p = torch.tensor([1, 2, 5], dtype=torch.float64) / 8
    distributions = torch.stack([torch.stack([p.roll(a + 2 * b) for a in range(3)]) for b in range(3)])
    for parents, drafted in DELTA_TREES:
        rule = delta_rule(parents, drafted, parts=8, rows_differ=rows_differ)
        assert distance_from_target(Toy(distributions, distributions), rule, 4) < 1e-12


DELTA_TREES = [
    ((-1, 0, 1), [2, 0]),
    ((-1, 0, 0, 0, 1), [1, 1, 1, 0]),
    ((-1, 0, 0, 1, 2), [2, 2, 1, 0]),
    ((-1, 0, 0, 1, 1), [0, 1, 2, 1]),
]


def check_block_accepts_more() -> None:
    """Of the same drafts block verification takes as many tokens as rejection or more, on average."""
    for seed in range(3):
        toy = Toy.random(3, seed)
        by_one = rejection_rule((-1, 0, 1, 2), "iid")(toy, (0, 0))
        together = block_rule(3)(toy, (0, 0))
        lengths = [sum(mass * len(x) for x, mass in distribution.items()) for distribution in (together, by_one)]
        assert lengths[0] > lengths[1] + 1e-3


def check_typical_distance() -> None:
    """The distance that typical acceptance reports is that of the distribution which enumerating its drafts gives."""
    toy = Toy.random(3, 5)
    tree, scores, weight = drafts(toy, (1, 2), (-1, 0, 1), "iid")
    p = scores.exp()
    floors = typical.thresholds(p)
    choice = typical.choose(p, floors, tree)
    distribution = torch.zeros(3, dtype=torch.float64).index_add_(0, choice[:, 0], weight)
    distance = typical.distances(p, floors, choice, tree)
    torch.testing.assert_close(distance[:, 0], ((distribution - p[0, 0]).abs().sum() / 2).expand(len(weight)))
    torch.testing.assert_close(distance[:, 2], 1 - p[:, 2].amax(-1))
    given = Tree(tree.tokens, tree.parents)
    certain = typical.distances(p, floors, choice, given)
    torch.testing.assert_close(certain[:, 0], 1 - p[:, 0].gather(1, choice[:, :1])[:, 0])


def check_draws() -> None:
    """A draw is the quantile of its distribution: a token's stretch of uniforms is as long as its probability."""
    distribution = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    marks = [1e-17, 0.125, 0.25 - 1e-9, 0.25 + 1e-9, 0.5, 0.75 - 1e-9, 0.75 + 1e-9, 1 - 2.0**-53, 1.0]
    drawn = draw(distribution.expand(len(marks), -1), torch.tensor(marks, dtype=torch.float64))
    assert drawn.tolist() == [1, 1, 1, 3, 3, 3, 4, 4, 4]


def check_zero_probability_never_accepted() -> None:
    """A draft token outside p's support is refused even by a uniform of exactly 0, and one outside q's as well."""
    p, q = torch.tensor([0.0, 0.5, 0.5]), torch.tensor([0.5, 0.5, 0.0])
    plan = rejection.node_plan(p, q, torch.tensor([0, 2]), torch.tensor([True, True]), True)
    assert not rejection.accepts(torch.zeros(2), plan.p_drafted, plan.q_drafted).any()
    one = Tree(torch.tensor([[0, 0]]), (-1, 0), "iid", q.log().expand(1, 2, -1))
    assert not (torch.zeros(1, 1) < block.plan(one, p.log().expand(1, 2, -1)).stop).any()


def check_drafts_follow_their_distribution(draws: int = 4000) -> None:
    """Tokens drawn for rejection follow the log q that is handed over (G statistic, threshold of 1e-9 at 3 degrees)."""
    distribution = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = Noise.of(0, list(range(draws)), 4, torch.device("cpu"))
    ids = torch.zeros(draws, 8, dtype=torch.long)
    context = Context(
        ids=ids,
        lengths=torch.full((draws,), 3),
        shortest=3,
        longest=3,
        sampling=Sampling(),
        temperature=torch.ones(1),
        noise=noise,
        shape=chain(1),
        drawn="iid",
        shares_noise=False,
        lease=Lease(),
    )
    gumbel = drafting.draft_noise(context)
    assert gumbel is not None
    token, log_q = drafting.draw(distribution.log().repeat(draws, 1), gumbel[:, 0], "iid")
    seen = torch.bincount(token[:, 0], minlength=4).double()
    expected = log_q[0].exp().double() * draws
    statistic = 2 * (seen * (seen.clamp(min=1) / expected).log()).sum()
    assert statistic < 45


def check_noise_is_read_once(verifier: str = "rejection", shape: Shape = CHAIN, replacement: bool = False) -> None:
    """A generation reads no random number outside the coupled stream twice."""
    model, draft = tiny_llama(VOCAB), tiny_llama(VOCAB, num_layers=1, seed=3)
    request = Request([[1, 2, 3], [4, 5]], 12, verifier=verifier, shape=shape, replacement=replacement, audit=True)
    Loop(model, LMDraft(draft), request).run()


def check_siblings_have_numbers_of_their_own() -> None:
    """The ledger of a tree, with and without replacement."""
    check_noise_is_read_once("rejection", k_ary([3, 2]))
    check_noise_is_read_once("rejection", k_ary([3, 2]), replacement=True)


def check_streams_differ() -> None:
    """Draft, accept and residual noise of one position and round are different numbers, and so are rounds, positions
    and draws."""
    keys = [
        int(Noise.of(5, [0], 1, CPU, round_index)._fresh_keys(stream, torch.tensor([[position]]), torch.tensor([draw])))
        for stream in (Stream.DRAFT, Stream.ACCEPT, Stream.RESIDUAL)
        for position in range(3)
        for round_index in range(3)
        for draw in range(3)
    ]
    assert len(set(keys)) == len(keys)


def check_filtered_tokens_never_emitted(verifier: str = "rejection") -> None:
    """With top-k 2, every emitted token is one of the two likeliest of its position."""
    model = tiny_llama(VOCAB, dtype=torch.float64)
    draft = LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))
    ids, _ = ragged_prompts(1)
    for seed in range(2):
        out = generate(model, draft, ids, max_new_tokens=20, top_k=2, seed=seed, verifier=verifier, eos_token_id=())
        best = model(out.sequences).logits[0].topk(2).indices
        new = range(ids.shape[1], out.sequences.shape[1])
        assert all(out.sequences[0, t] in best[t - 1] for t in new)


def check_sliding_window() -> None:
    """Nodes of a tree lie in slots beyond their positions: a window counted in slots would let them see too much."""
    check_cache("tree", "gemma3")


def check_cache(kind: str = "oracle", name: str = "llama") -> None:
    """After every round the committed keys and values are those of a fresh prefill, with all other slots poisoned."""
    model, (ids, mask) = MODELS[name](), ragged_prompts(3)
    texts = texts_of(generate(model, None, ids, mask, max_new_tokens=22, eos_token_id=(), seed=0), ids, mask)
    drafter = (OracleTree if kind == "tree" else Oracle)(texts, VOCAB)
    rows, _ = audited_run(model, drafter, Request(unpadded(ids, mask), 20, shape=chain(4)))
    assert all(row == text[: len(row)] for row, text in zip(rows, texts, strict=True))


def audited_run(model: PreTrainedModel, drafter: Drafter | None, request: Request) -> tuple[list[list[int]], Loop]:
    """What `Loop.run` gives, the cache poisoned before and audited after every round."""
    loop = Loop(model, drafter, request)
    step = loop.step

    def audited_step() -> Any:
        poison(loop)
        events = step()
        audit(loop, model)
        return events

    loop.step = audited_step  # type: ignore[method-assign]
    tokens, _ = loop.run()
    return tokens, loop


def poison(loop: Loop) -> None:
    """1e30 rather than NaN: a masked NaN poisons a sum anyhow, a finite value only where it is seen."""
    for layer in loop.runner.cache.slot_layers:
        for row, length in enumerate(loop.rows.lengths):
            layer.keys[row, :, length - 1 :] = 1e30  # type: ignore[index]
            layer.values[row, :, length - 1 :] = 1e30  # type: ignore[index]


def audit(loop: Loop, model: PreTrainedModel) -> None:
    """Committed slots of every row against a prefill of its tokens; what follows a shorter row cannot touch it."""
    rows = [one.tokens[:-1] for one in loop.rows.current]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    fresh = DynamicCache()  # without a config: layers with a window would forget what lies outside
    model(ids, use_cache=True, **{str(cache_argument(type(model))): fresh})
    held = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
    for ours, theirs in zip(loop.runner.cache.slot_layers, fresh.layers, strict=True):
        assert isinstance(theirs, DynamicLayer)
        for have, want in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert have is not None
            assert want is not None
            off = (have[:, :, :longest] - want).abs().amax((1, 3))
            assert off[held].max() < 1e-11, f"cached states are off by {off[held].max()}"
