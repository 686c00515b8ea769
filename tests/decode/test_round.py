"""Rounds as functions of tensors: read late, they write the same texts; captured as a whole, the same; and how a
verdict changes the state of the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from decode.autotune.budget import Budget
from decode.drafters.base import Context
from decode.drafters.lm import LMDraft
from decode.forward.kept.lease import Lease
from decode.forward.runner import Runner
from decode.forward.target import CachedModel
from decode.loop import Loop
from decode.requests import Request
from decode.rounds.flights import Reading
from decode.rounds.round import Round, Rule, outcome
from decode.rounds.state import State
from decode.sampling.noise import Noise, token_table
from decode.sampling.stopping import Criteria
from decode.sampling.warp import Sampling
from decode.trees.tree_plans import Dynamic, chain, k_ary
from decode.verify import VERIFIERS
from decode.verify.verdict import Verdict
from tests.decode.heads import VARIANTS, random_head
from tests.tiers import by_default
from tests.tiny import tiny_llama

PROMPTS = [[5, 9, 2, 7, 11, 30], [1, 8], [4, 4, 6, 3, 2], [9], [7, 7, 1], [2, 3]]
LONG = 100  # tokens, behind which few are left before more slots are laid out
DRAFTS = ["none", "lm", *VARIANTS]
SHAPES = {"chain": chain(4), "tree": k_ary([2, 2, 1]), "dynamic": Dynamic(4, 3, 9)}
FIRST = [
    ("none", "chain"),
    ("lm", "chain"),
    ("lm", "tree"),
    (DRAFTS[2], "dynamic"),
]
EVERY = [*FIRST, *(one for one in product(DRAFTS, SHAPES) if one not in FIRST)]
IN_TURN = by_default(len(FIRST), EVERY)


def draft_of(model: Any, name: str) -> Any:
    if name == "none":
        return None
    if name == "lm":
        return LMDraft(tiny_llama(num_layers=1, seed=3, dtype=torch.float64))
    return random_head(name, model)


def long_prompt(length: int) -> list[int]:
    return [7 * place % 60 + 1 for place in range(length)]


def late(model: Any, draft: Any, request: Request, lag: int) -> tuple[list[list[int]], Any]:
    """Texts and stats of a call whose host reads `lag` rounds behind."""
    loop = Loop(model, draft, request)
    loop.lag = lag
    return loop.run()


@pytest.mark.parametrize(("name", "shape"), IN_TURN)
def test_a_host_that_reads_later_writes_the_same_texts(name: str, shape: str) -> None:
    """Rows refilled while rounds are in flight, texts that end by a token, by length, and where only the host knows."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    draft = draft_of(model, name)  # the same in all calls, which share their captures
    ends = Criteria.of(lambda ids, scores: torch.tensor([int(ids.sum()) % 11 == 0]))
    for criteria, eos in ((None, {3, 5}), (ends, {3})):
        request = Request(
            PROMPTS, 24, shape=SHAPES[shape], batch_size=2, eos_ids=frozenset(eos), criteria=criteria, seed=1
        )
        texts, stats = late(model, draft, request, 0)
        for lag in (1, 2):
            found, later = late(model, draft, request, lag)
            assert found == texts
            assert later.finish_reasons == stats.finish_reasons
            assert later.num_tokens == stats.num_tokens
    assert {"stop", "eos"} <= set(stats.finish_reasons) | {"eos"}


@pytest.mark.slow
def test_rules_that_draw_noise_of_their_own_write_the_same_texts_whenever_they_are_read() -> None:
    """One call without refills: a round's noise is keyed by its number, and a late host launches the same rounds."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    draft = draft_of(model, "lm")
    for verifier in ("rejection", "block", "typical"):
        request = Request(PROMPTS, 20, verifier=verifier, shape=chain(3), seed=2)
        texts = late(model, draft, request, 0)[0]
        assert late(model, draft, request, 1)[0] == texts


@pytest.mark.parametrize(
    ("name", "lag"), by_default(1, [("lm", 1), ("lm", 2), ("none", 1), ("lm", 0), ("none", 0), ("none", 2)])
)
def test_a_row_that_the_host_ends_waits_for_the_others(name: str, lag: int) -> None:
    """The device did not know of it, and wrote behind the slots that passes look at: an index out of bounds."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    ends = Criteria.of(lambda ids, scores: torch.tensor([ids.shape[1] >= LONG + 2]))
    request = Request([long_prompt(LONG), [1, 8]], LONG, shape=chain(4), seed=1, criteria=ends)
    texts, stats = late(model, draft_of(model, name), request, lag)
    assert stats.finish_reasons == ["stop", "stop"]
    alone = [replace(request, prompts=[prompt], rows=[row]) for row, prompt in enumerate(request.prompts)]
    assert texts == [late(model, None, one, 0)[0][0] for one in alone]


def test_rounds_in_flight_add_nothing_behind_the_end_of_a_row() -> None:
    """A cache that is full to the last slot: bounds that let rows grow past their ends asked for more."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    request = Request([long_prompt(241), long_prompt(236)], 10, shape=chain(4), seed=1)
    assert late(model, draft_of(model, "lm"), request, 1)[0] == late(model, None, request, 0)[0]


@pytest.mark.parametrize("seed", [3, 4])
def test_a_tree_of_which_the_draft_reads_most_fits_beside_a_row_that_has_ended(seed: int) -> None:
    """A slot was missing: a round can be tried a token further on than its longest row."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    prompts = [long_prompt(240), long_prompt(20), long_prompt(30)]
    request = Request(prompts, 6, shape=Dynamic(4, 3, 9), seed=seed)
    assert late(model, draft_of(model, "lm"), request, 0)[0] == late(model, None, request, 0)[0]


@pytest.mark.parametrize("name", ["lm", "eagle3"])
def test_a_draft_catches_up_near_the_end_of_its_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over many tokens at once lie before the end of the text, and were given room behind it."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    rounds = count(1)
    monkeypatch.setattr(Budget, "_choose", lambda self, deepest: 0 if next(rounds) % 20 else deepest)
    request = Request([long_prompt(180)], 66, shape=chain(4), seed=1, adaptive=True)
    texts, stats = late(model, draft_of(model, name), request, 0)
    assert texts == late(model, None, request, 0)[0]
    assert sum(one.drafted > 0 for one in stats.rounds) > 2


@pytest.mark.parametrize(("name", "shape"), by_default(4, EVERY))
def test_a_round_captured_as_a_whole_writes_the_same_texts(
    name: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = tiny_llama(dtype=torch.float64).requires_grad_(False), None
    draft = draft_of(model, name)
    request = Request(PROMPTS[:3], 40, shape=SHAPES[shape], seed=1)
    with monkeypatch.context() as patch:
        patch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)
        texts = Loop(model, draft, request).run()[0]
    keys: list[Any] = []
    kept = Runner._keep
    monkeypatch.setattr(Runner, "_keep", lambda self, key, *rest: (keys.append(key), kept(self, key, *rest))[1])
    loop = Loop(model, draft, request)
    assert loop.run()[0] == texts
    assert {key[0] for key in keys} == {"round"}, "one unit, not its parts"
    assert not loop.runner.told


def test_a_round_that_asks_for_more_than_its_draft_has_is_captured_over_the_slots_of_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a long row, a target pass over fewer nodes than were asked for laid out fewer slots inside the round, and
    its capture wrote elsewhere: wrong texts where it was used again."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    draft, prompts = random_head("medusa", model), [long_prompt(100), long_prompt(55)[::-1]]
    request = Request(prompts, 12, shape=chain(12), seed=1, batch_size=1)
    texts = late(model, None, request, 0)[0]
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 1)
    assert [Loop(model, draft, request).run()[0] for _ in range(2)] == [texts, texts]


class Traffic(TorchFunctionMode):
    """Counts what crosses between host and device: tensors made of Python values, and values made of tensors."""

    UPLOADS = (torch.tensor, torch.as_tensor, torch.from_numpy)
    READS = (Tensor.tolist, Tensor.item, Tensor.__int__, Tensor.__bool__, Tensor.__float__, Tensor.numpy, Tensor.cpu)

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.UPLOADS:
            self.seen["upload"] += 1
        if func in self.READS:
            self.seen["read"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "as it is"])
@pytest.mark.parametrize(("name", "shape"), IN_TURN)
def test_a_round_reads_once_and_uploads_nothing(
    name: str, shape: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refills, which write prompts, apart; the first rounds upload constants."""
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 3 if captured else 10**9)
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    loop = Loop(model, draft_of(model, name), Request([[5, 9, 2, 7], [1, 8]], 60, shape=SHAPES[shape]))
    loop.lag = 1
    with torch.inference_mode():
        loop._start()
        for _ in range(6):
            loop.step()
        with Traffic() as traffic:
            for _ in range(4):
                loop.step()
    assert traffic.seen == {"read": 4}


def test_the_traffic_of_a_round_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that asks for a value and uploads one is counted."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    loop = Loop(model, None, Request([[5, 9, 2, 7]], 60))
    verdict = Round._verdict

    def asking(self: Round, tree: Any, logits: Tensor, *rest: Any) -> Any:
        return verdict(self, tree, logits + torch.tensor(0.0 if logits.sum() > 0 else 1.0), *rest)

    monkeypatch.setattr(Round, "_verdict", asking)
    with torch.inference_mode(), Traffic() as traffic:
        loop._start()
        traffic.seen.clear()
        loop.step()
    assert traffic.seen == {"read": 2, "upload": 1}


@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        pytest.param(name, one, marks=[pytest.mark.slow] * (name == "lm" and one != "coupled"))
        for name in ("none", "lm")
        for one in VERIFIERS
    ],
)
def test_a_round_of_8b_shapes_runs_without_values(name: str, verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On `meta` a value that is asked for raises, and so does a partner on another device."""
    meta, batch, longest = torch.device("meta"), 2, 700
    model = eight_billion(meta)
    monkeypatch.setattr("decode.drafters.lm.head_of", lambda model: None)  # compares values; training alone needs it
    monkeypatch.setattr("decode.drafters.lm.runner_for", lambda model, rows, slots, *_: CachedModel(model, rows, slots))
    shape = chain(4) if verifier in ("block", "rejection") else k_ary([3, 2, 1])
    target = CachedModel(model, batch, 1024)
    draft = LMDraft(small(meta)) if name == "lm" else None
    for sampling in (Sampling(), Sampling(0), Sampling(1, top_k=40, top_p=0.9, min_p=0.05)):
        rule = Rule(sampling, VERIFIERS[verifier], VERIFIERS[verifier].drawn(shape, False) or "arbitrary")
        state = State(*(one.to(meta) for one in State.of(batch, 1024, 1.0, [2], torch.device("cpu"))))
        wanted = Context(
            ids=state.ids,
            lengths=state.lengths,
            shortest=longest - 4,
            longest=longest,
            sampling=sampling,
            temperature=state.temperature,
            noise=Noise(state.keys, token_table(model.config.vocab_size, meta), state.round_index),
            shape=shape,
            drawn=rule.drawn,
            shares_noise=rule.verifier.shares_noise,
            lease=Lease(),
        )
        with torch.inference_mode():
            if draft is not None:
                draft.start(wanted, 1024)
                assert draft.prepare(wanted)
            found = outcome(Round(target, draft, rule, wanted)(*state))
        depth = shape.depth if draft is not None else 0
        assert found.report.shape == (batch, 2 + depth + 1)
        both = zip(found.state, state, strict=True)
        assert all(one.device == meta and one.shape == before.shape for one, before in both)


def eight_billion(device: torch.device, layers: int = 4) -> Any:
    """Qwen3-8B's shape, without values and most of its layers."""
    return qwen3(device, hidden_size=4096, intermediate_size=12288, layers=layers, heads=32)


def small(device: torch.device) -> Any:
    """Qwen3-0.6B's shape, as well."""
    return qwen3(device, hidden_size=1024, intermediate_size=3072, layers=4, heads=16)


def qwen3(device: torch.device, hidden_size: int, intermediate_size: int, layers: int, heads: int) -> Any:
    with device:
        config = Qwen3Config(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=4096,
        )
        model = Qwen3ForCausalLM(config).bfloat16()
    return model.eval().requires_grad_(False)


def test_a_reading_is_what_was_there_when_it_was_begun() -> None:
    values = torch.arange(6).view(2, 3)
    assert Reading(values).values() == [[0, 1, 2], [3, 4, 5]]


def test_a_budget_hears_of_rounds_whose_rows_were_given_away() -> None:
    """Rows of one token each are refilled in every round, while the next one is in flight: it tells of nobody."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    request = Request(PROMPTS, 6, shape=chain(3), batch_size=1, eos_ids=frozenset(range(40)), adaptive=True)
    loop = Loop(model, draft_of(model, "lm"), request)
    loop.lag = 1
    loop.run()
    assert loop.budget is not None
    assert loop.budget._ahead <= len(loop.flights)


def test_distances_of_a_lossy_rule_are_those_of_its_round_however_late_they_are_read() -> None:
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    request = Request(PROMPTS[:3], 20, verifier="typical", shape=chain(3), seed=2)
    draft = draft_of(model, "lm")
    told = [late(model, draft, request, lag)[1].distances for lag in (0, 1)]
    assert told[0] == told[1]
    assert any(told[0])


END_IDS = [3, 5]


def expected(ids: list[int], end: int, finished: bool, accepted: int, tokens: list[int]) -> tuple[list[int], bool]:
    """The row's tokens after the round, and whether it has ended."""
    if finished:
        return ids, True
    for token in tokens[: accepted + 1]:
        ids = [*ids, token]
        if token in END_IDS or len(ids) == end:
            return ids, True
    return ids, False


def test_rows_grow_to_the_end_of_the_text_or_of_the_room() -> None:
    """Rows of any length, with any room left, ended ones among them; every place for the end token occurs."""
    chosen = torch.Generator().manual_seed(0)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=chosen)

    rows, depth, capacity = 400, 4, 40
    state = State.of(rows, capacity, 0.7, END_IDS, torch.device("cpu"))
    prompts = [random(6, 60, int(random(1, 20, 1))).tolist() for _ in range(rows)]
    ends = [len(prompt) + int(random(1, 8, 1)) for prompt in prompts]
    for some in torch.arange(rows).split(70):  # some begin beside others that run
        chosen_rows = some.tolist()
        state.seat(chosen_rows, [prompts[row] for row in chosen_rows], [ends[row] for row in chosen_rows], some)
    assert state.keys.tolist() == [*range(rows)]
    state.finished[::7] = True
    accepted, tokens = random(0, depth + 1, rows), random(0, 12, rows, depth + 1)
    after = state.after(Verdict(torch.zeros_like(tokens), accepted, tokens))
    seen = set()
    for row, prompt in enumerate(prompts):
        want, ended = expected(prompt, ends[row], row % 7 == 0, int(accepted[row]), tokens[row].tolist())
        assert after.ids[row, : len(want)].tolist() == want
        assert (int(after.lengths[row]), bool(after.finished[row])) == (len(want), ended)
        seen.add((len(want) - len(prompt), ended))
    assert seen >= {(grown, ended) for grown in range(1, depth + 2) for ended in (False, True)} | {(0, True)}
    assert int(after.round_index) == 1
    assert torch.equal(state.lengths, torch.tensor([len(prompt) for prompt in prompts])), "the old state is left alone"


def test_a_text_without_end_tokens_ends_by_length_alone() -> None:
    state = State.of(1, 8, 1.0, (), torch.device("cpu"))
    state.seat([0], [[1, 2]], [5], torch.tensor([0]))
    after = state.after(Verdict(torch.zeros(1, 5).long(), torch.tensor([4]), torch.tensor([[3, 5, 3, 5, 3]])))
    assert (after.ids[0, :5].tolist(), after.lengths.tolist(), after.finished.tolist()) == (
        [1, 2, 3, 5, 3],
        [5],
        [True],
    )


def test_a_row_that_the_host_has_ended_stays_as_long_as_it_says() -> None:
    state = State.of(2, 12, 1.0, (), torch.device("cpu"))
    state.seat([0, 1], [[1, 2, 4]] * 2, [12, 12], torch.tensor([0, 1]))
    state.stop(0, 2)
    tokens = torch.tensor([[7, 8, 9]] * 2)
    after = state.after(Verdict(torch.zeros(2, 3).long(), torch.tensor([2, 2]), tokens))
    assert (after.lengths.tolist(), after.finished.tolist()) == ([2, 6], [True, False])
