"""The properties of the decoder as functions: the tests call them as they are, and the mutants must make them fail."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode import verify
from decode.drafters import lm, lm_chain
from decode.drafters.base import Drafter
from decode.hf import Output, generate
from decode.loop import Loop, Request
from decode.noise import Noise, Stream
from decode.shapes import chain
from decode.tree import Tree, chain_parents
from tests.decode.drafters import Oracle, OracleTree
from tests.tiny import tiny_llama

VOCAB = 64


def ragged_prompts(batch: int, vocab_size: int = VOCAB, seed: int = 1) -> tuple[Tensor, Tensor]:
    """(ids, mask): `batch` prompts of 9, 8, 7, ... tokens, padded on the left."""
    ids = torch.randint(0, vocab_size, (batch, 9), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, :row] = 0
    return ids, mask


def both_ways(model: PreTrainedModel, drafter: Drafter | str, batch: int, **settings: object) -> tuple[Output, Output]:
    """Autoregressive and speculative output of the same call; "oracle" and "tree" know the autoregressive text."""
    ids, mask = ragged_prompts(batch, model.config.get_text_config().vocab_size)
    settings = {"eos_token_id": ()} | settings
    call = partial(generate, model, input_ids=ids, attention_mask=mask, **settings)  # type: ignore[arg-type]
    plain = call(None)
    if isinstance(drafter, str):
        texts = [
            row[kept].tolist() + new.tolist()
            for row, kept, new in zip(ids, mask.bool(), plain.sequences[:, ids.shape[1] :], strict=True)
        ]
        kind = OracleTree if drafter == "tree" else Oracle
        drafter = kind(texts, model.config.get_text_config().vocab_size)
    return plain, call(drafter)


def check_pathwise_equality(model: PreTrainedModel, drafter: Drafter | str, batch: int, **settings: object) -> Output:
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


class Toy:
    """A Markov-free toy: laws p and q of the next token for every prefix of at most `depth` tokens, fp64."""

    def __init__(self, vocab_size: int, depth: int, seed: int, zeros: bool = False) -> None:
        self.vocab_size, self.depth = vocab_size, depth
        generator = torch.Generator().manual_seed(seed)
        self.p = {prefix: self._law(generator, zeros) for prefix in self.prefixes(depth)}
        self.q = {prefix: self._law(generator, zeros) for prefix in self.prefixes(depth)}

    def prefixes(self, depth: int) -> list[tuple[int, ...]]:
        """Every prefix up to `depth` tokens."""
        return [x for n in range(depth + 1) for x in itertools.product(range(self.vocab_size), repeat=n)]

    def _law(self, generator: torch.Generator, zeros: bool) -> Tensor:
        law = torch.rand(self.vocab_size, generator=generator, dtype=torch.float64) ** 3 + 1e-3
        if zeros:
            law[torch.randint(self.vocab_size, (1,), generator=generator)] = 0
        return law / law.sum()

    def sequence_law(self, prefix: tuple[int, ...], rest: int) -> dict[tuple[int, ...], float]:
        """Product law of p: probability of every continuation of `prefix` by `rest` tokens."""
        law = {prefix: 1.0}
        for _ in range(rest):
            law = {(*x, v): mass * self.p[x][v].item() for x, mass in law.items() for v in range(self.vocab_size)}
        return law


def rejection_sequence_law(toy: Toy, k: int, drawn: str = "iid") -> dict[tuple[int, ...], float]:
    """Exact law of the first k + 1 tokens that one round of rejection, then p itself, emit: every draft and outcome
    enumerated."""
    total: dict[tuple[int, ...], float] = {}
    for draft in itertools.product(range(toy.vocab_size), repeat=k):
        prefixes = [draft[:i] for i in range(k + 1)]
        weight = 1.0
        for prefix, token in zip(prefixes, draft, strict=False):
            weight *= toy.q[prefix][token].item()
        if weight == 0:
            continue
        for sequence, mass in _round_law(toy, draft, prefixes, drawn).items():
            total[sequence] = total.get(sequence, 0.0) + weight * mass
    return total


def _round_law(
    toy: Toy, draft: tuple[int, ...], prefixes: list[tuple[int, ...]], drawn: str
) -> dict[tuple[int, ...], float]:
    k = len(draft)
    log_q = torch.stack([toy.q[x] for x in prefixes]).log()[None]
    tree = Tree(torch.tensor([[0, *draft]]), chain_parents(k + 1), drawn, log_q if drawn == "iid" else None)  # type: ignore[arg-type]
    plan = verify.rejection_plan(torch.stack([toy.p[x] for x in prefixes]).log()[None], tree)
    law: dict[tuple[int, ...], float] = {}
    reach = 1.0
    for n in range(k + 1):
        accept = plan.accept[0, n].item() if n < k else 0.0
        for v in range(toy.vocab_size):
            stop = reach * (1 - accept) * plan.residual[0, n, v].item()
            if stop > 0:
                for sequence, mass in toy.sequence_law((*draft[:n], v), k - n).items():
                    law[sequence] = law.get(sequence, 0.0) + stop * mass
        reach *= accept
    return law


def check_rejection_law(vocab_size: int = 3, k: int = 2, drawn: str = "iid", zeros: bool = False) -> None:
    """The enumerated joint law of k + 1 tokens is the product law of p to 1e-13."""
    for seed in range(3):
        toy = Toy(vocab_size, k, seed, zeros)
        want, have = toy.sequence_law((), k + 1), rejection_sequence_law(toy, k, drawn)
        assert max(abs(want[x] - have.get(x, 0.0)) for x in want) < 1e-13


def check_zero_probability_never_accepted() -> None:
    """A draft token outside p's support is refused even by a uniform of exactly 0."""
    p, q = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]), torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    plan = verify.rejection_plan(p.log(), Tree(torch.tensor([[0, 0]]), (-1, 0), "iid", q.log()))
    assert not verify.accepts(torch.zeros(1, 1), plan).any()


def check_drafts_follow_their_law(draws: int = 4000) -> None:
    """Tokens drawn for rejection follow the log q that is handed over (G statistic, threshold of 1e-9 at 3 degrees)."""
    law = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = Noise(0, list(range(draws)), 4, torch.device("cpu"))
    gumbel = noise.fresh_gumbel(Stream.DRAFT, [[3]] * draws, 0)[:, 0]
    token, log_q = lm_chain.draw(law.log().repeat(draws, 1), gumbel, "iid")
    seen = torch.bincount(token[:, 0], minlength=4).double()
    expected = log_q[0].exp().double() * draws
    statistic = 2 * (seen * (seen.clamp(min=1) / expected).log()).sum()
    assert statistic < 45


def check_noise_is_read_once() -> None:
    """A generation with rejection reads no random number outside the coupled stream twice."""
    model, draft = tiny_llama(VOCAB), tiny_llama(VOCAB, num_layers=1, seed=3)
    request = Request([[1, 2, 3], [4, 5]], 24, verifier="rejection", shape=chain(4), audit=True)
    Loop(model, lm.LMDraft(draft), request).run()


def check_streams_differ() -> None:
    """Draft, accept and residual noise of one position and round are different numbers, and so are rounds and
    positions."""
    noise = Noise(5, [0], 1, torch.device("cpu"))
    keys = [
        noise._fresh_keys(stream, [[position]], round_index)[0][0]
        for stream in (Stream.DRAFT, Stream.ACCEPT, Stream.RESIDUAL)
        for position in range(3)
        for round_index in range(3)
    ]
    assert len(set(keys)) == len(keys)


def check_filtered_tokens_never_emitted(verifier: str = "rejection") -> None:
    """With top-k 2, every emitted token is one of the two likeliest of its position."""
    model = tiny_llama(VOCAB, dtype=torch.float64)
    draft = lm.LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))
    ids, _ = ragged_prompts(1)
    for seed in range(4):
        out = generate(model, draft, ids, max_new_tokens=24, top_k=2, seed=seed, verifier=verifier, eos_token_id=())
        best = model(out.sequences).logits[0].topk(2).indices
        new = range(ids.shape[1], out.sequences.shape[1])
        assert all(out.sequences[0, t] in best[t - 1] for t in new)


def check_cache(kind: str = "oracle", batch: int = 3, steps: int = 8) -> None:
    """After every round the committed keys and values are those of a fresh prefill, with all other slots poisoned."""
    model = tiny_llama(VOCAB, dtype=torch.float64)
    plain, _ = both_ways(model, "oracle", batch, max_new_tokens=40)
    ids, mask = ragged_prompts(batch)
    prompts = [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]
    texts = [x + new.tolist() for x, new in zip(prompts, plain.sequences[:, ids.shape[1] :], strict=True)]
    drafter = (OracleTree if kind == "tree" else Oracle)(texts, VOCAB)
    loop = Loop(model, drafter, Request(prompts, 40, shape=chain(4)))
    with torch.inference_mode():
        loop._prefill(range(len(prompts)))
        for _ in range(steps):
            _poison(loop)
            loop.step()
            _audit(loop, model)
    assert all(
        row == text[: len(row)] for row, text in zip((one.tokens for one in loop.rows.requests), texts, strict=True)
    )


def _poison(loop: Loop) -> None:
    """1e30 rather than NaN: a masked NaN poisons a sum anyhow, a finite value only where it is seen."""
    for layer in loop.runner.cache.slot_layers:
        for row, length in enumerate(loop.rows.lengths):
            layer.keys[row, :, length - 1 :] = 1e30  # type: ignore[index]
            layer.values[row, :, length - 1 :] = 1e30  # type: ignore[index]


def _audit(loop: Loop, model: PreTrainedModel) -> None:
    for row, tokens in enumerate(one.tokens for one in loop.rows.current):
        fresh = model(torch.tensor([tokens[:-1]]), use_cache=True).past_key_values
        for ours, theirs in zip(loop.runner.cache.slot_layers, fresh.layers, strict=True):
            held = len(tokens) - 1
            assert ours.keys is not None
            assert ours.values is not None
            torch.testing.assert_close(ours.keys[row, :, :held], theirs.keys[0], rtol=0, atol=1e-11)
            torch.testing.assert_close(ours.values[row, :, :held], theirs.values[0], rtol=0, atol=1e-11)
