"""Drafts with another tokenizer: the text stays what it is, twins are accepted, and no token is read twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode import generate
from decode.drafters.base import Context
from decode.drafters.lm import LMDraft
from decode.drafters.lm_steps import PassByPass
from decode.drafters.untrained.cascade import CascadeDrafter
from decode.drafters.untrained.config import NgramConfig
from decode.drafters.untrained.foreign.drafter import ForeignDrafter
from decode.drafters.untrained.mixture import MixtureDrafter
from decode.drafters.untrained.ngram import NgramDrafter
from decode.forward.target import CachedModel
from decode.loop import Loop
from decode.requests import Request
from decode.sampling.warp import Sampling
from decode.trees.tree import Tree
from decode.trees.tree_plans import chain
from tests.decode.untrained.foreign_models import TEXT, byte_level, llama, metaspace, permuted, reciter, shared, spelled
from tests.tiers import by_default
from tests.tiny import tiny_llama

PAIRS = {
    "other kind of draft": lambda: (byte_level(300), metaspace()),
    "larger draft": lambda: (byte_level(300), byte_level(420)),
    "smaller draft": lambda: (byte_level(420), byte_level(258)),
    "other kind of target": lambda: (metaspace(), byte_level(300)),
}
PROMPTS = [TEXT[:6], "for é", "return x, y, z in range", "a", "# 日本", "x = größe  # “für"]


class Checked(ForeignDrafter):
    """Compares the first token of each draft with the likeliest shared one of a pass without a cache."""

    checked = 0

    def propose(self, context: Context) -> Tree:
        tree, pairs = super().propose(context), self.shared.pairs
        for row, text in enumerate(self._texts):
            if text is not None:
                logits = self.model(torch.tensor([text])).logits[0, -1]
                assert int(tree.tokens[row, 1]) == int(pairs[1][logits[pairs[0]].argmax()])
                self.checked += 1
        return tree


def drafter_of(pair: str, seed: int = 3) -> ForeignDrafter:
    """With random weights."""
    target, own = PAIRS[pair]()
    return ForeignDrafter(llama(len(own), seed), shared(target, own))


@pytest.mark.parametrize("tree", by_default(1, ["chain", "2x2x1", "dynamic"]))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pair", by_default(1, PAIRS))
def test_the_text_is_that_of_plain_decoding(pair: str, temperature: float, tree: str) -> None:
    """Ragged prompts that take over rows, halves of characters among them."""
    target, _ = PAIRS[pair]()
    prompts = [spelled(target, text)[: 3 + at * 5] for at, text in enumerate(PROMPTS)]
    size = max(map(len, prompts))
    ids = torch.tensor([[0] * (size - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (size - len(one)) + [1] * len(one) for one in prompts])
    asked: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": 3, "eos_token_id": (5,)}
    model, drafter = llama(len(target)), drafter_of(pair)
    plain = generate(model, None, ids, mask, batch_size=2, **asked)
    for verifier in ("coupled", "rejection", "block") if tree == "chain" else ("coupled", "rejection"):
        exact = {"num_draft_tokens": 3, "tree": tree, "verifier": verifier, "audit": True, "batch_size": 2}
        out = generate(model, drafter, ids, mask, **asked, **exact)
        assert any(one.drafted for one in out.stats.rounds)
        assert (verifier != "coupled" and temperature) or torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize(
    ("verifier", "temperature"), [("coupled", 0.0), ("coupled", 1.0), ("rejection", 1.0), ("block", 1.0)]
)
def test_a_twin_under_other_numbers_is_accepted_whole(verifier: str, temperature: float) -> None:
    """The target's own weights, its tokens in another order: under every rule all of its drafts stand."""
    tokenizer, model = byte_level(300), llama(300)
    other, twin = permuted(tokenizer, model)
    drafter = ForeignDrafter(twin, shared(tokenizer, other))
    ids = torch.tensor([spelled(tokenizer)[:5], spelled(tokenizer)[5:10], spelled(tokenizer)[20:25]])
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": 3, "eos_token_id": ()}
    out = generate(model, drafter, ids, num_draft_tokens=4, verifier=verifier, audit=True, batch_size=2, **asked)
    assert out.stats.tau == 5


@pytest.mark.parametrize("pair", ["smaller draft", "other kind of target"])
def test_a_twin_in_text_is_accepted(pair: str) -> None:
    """Both write the same text, characters of several bytes among it, each in its own tokens; 5 is the most."""
    target, own = PAIRS[pair]()
    script = spelled(target)
    drafter = ForeignDrafter(reciter(own), shared(target, own))
    loop = Loop(reciter(target), drafter, Request([script[:4], script[:9]], len(script) - 10, shape=chain(4)))
    texts, stats = loop.run()
    assert texts == [script[: len(text)] for text in texts]
    assert stats.tau > 3


def test_drafts_are_those_of_a_draft_without_a_cache() -> None:
    check_drafts()


def check_drafts() -> None:
    """In every round of rows that are taken over, whatever was refused before: the first token drafted is the draft's
    likeliest of all shared ones behind its own spelling of the text."""
    target, own = PAIRS["other kind of draft"]()
    drafter = Checked(llama(len(own), 3), shared(target, own))
    prompts = [spelled(target, text) for text in PROMPTS]
    request = Request(prompts, 12, Sampling(0), shape=chain(3), batch_size=2)
    Loop(llama(len(target)), drafter, request).run()
    assert drafter.checked > 60


@pytest.mark.parametrize("sizes", [[240], [100, 600]])
def test_drafts_are_right_and_passes_narrow_where_the_cache_grows(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bytes the text passes the first cache's 256 slots: in the middle of a call, and as a request takes over the
    row of one that began alike."""
    widths, runners, real = list[int](), set[CachedModel](), PassByPass.chain

    def passed(self: PassByPass, tokens: Any, place: int) -> Any:
        widths.append(tokens.shape[1])
        runners.add(self.runner)
        return real(self, tokens, place)

    monkeypatch.setattr(PassByPass, "chain", passed)
    target, own = PAIRS["smaller draft"]()
    model = tiny_llama(len(own), 32, 1, seed=3, dtype=torch.float64, max_position_embeddings=4096)
    drafter = Checked(model.requires_grad_(False), shared(target, own))
    prompts = [spelled(target, ("return range(" * 60)[:size]) for size in sizes]
    teller = tiny_llama(len(target), 32, 1, dtype=torch.float64, max_position_embeddings=4096).requires_grad_(False)
    Loop(teller, drafter, Request(prompts, 16, Sampling(0), shape=chain(3), batch_size=1)).run()
    assert len(runners) == 2
    assert drafter.checked > 10
    assert max(widths) <= 32


def test_nothing_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt once; then, in each round, what is new of the text, which is one or two tokens, and the drafts but for
    the last one."""
    tokenizer, model = byte_level(300), llama(300)
    other, twin = permuted(tokenizer, model)
    script, widths, prompts = spelled(tokenizer), list[int](), list[int]()
    real_chain, real_prefill = PassByPass.chain, CachedModel.prefill

    def passed(self: PassByPass, tokens: Any, place: int) -> Any:
        widths.append(tokens.shape[1])
        return real_chain(self, tokens, place)

    def prefilled(self: CachedModel, ids: Any, begin: list[int], end: list[int]) -> None:
        if self.model is twin:
            prompts.append(sum(end) - sum(begin))
        real_prefill(self, ids, begin, end)

    monkeypatch.setattr(PassByPass, "chain", passed)
    monkeypatch.setattr(CachedModel, "prefill", prefilled)
    drafter = ForeignDrafter(twin, shared(tokenizer, other))
    _, stats = Loop(model, drafter, Request([script[:60]], 40, Sampling(0), shape=chain(4))).run()
    drafted = [one for one in stats.rounds if one.drafted]
    assert prompts == [59]
    assert widths == [2, 1, 1, 1] * len(drafted)


@pytest.mark.parametrize("longest", [256, 1024])
def test_a_text_that_outgrows_the_room_for_it_is_drafted_for_as_far_as_the_draft_knows_contexts(longest: int) -> None:
    """The target's text is of few tokens, and the draft writes it in bytes."""
    target, own = PAIRS["smaller draft"]()
    text = "return range(" * 30
    model = tiny_llama(len(own), dtype=torch.float64, max_position_embeddings=longest).requires_grad_(False)
    drafter = ForeignDrafter(model, shared(target, own))
    _, stats = Loop(llama(len(target)), drafter, Request([spelled(target, text)], 8, shape=chain(3))).run()
    assert any(one.drafted for one in stats.rounds) == (longest > len(text))
    assert drafter.reader is not None
    assert (drafter.reader.runner.cache.capacity >= len(text)) == (longest > len(text))


def test_a_target_that_may_write_no_shared_token_is_drafted_for_in_vain() -> None:
    """Not a number otherwise: nothing is left of the draft's distribution."""
    target, own = PAIRS["smaller draft"]()
    between = shared(target, own)
    lonely = [token for token in range(len(target)) if token not in between.own_of][:2]
    out = generate(
        llama(len(target)), ForeignDrafter(llama(len(own)), between), torch.tensor([spelled(target)[:5]]),
        prefix_allowed_tokens_fn=lambda *_: lonely, max_new_tokens=10, verifier="rejection", seed=1, eos_token_id=(),
    )  # fmt: skip
    assert set(out.sequences[0, 5:].tolist()) <= set(lonely)


def test_it_is_a_member_and_a_helper() -> None:
    """Of a mixture with a lookup, and of a cascade whose draft it guesses."""
    target, model = byte_level(300), llama(300)
    ids = torch.tensor([spelled(target)[:7], spelled(target)[9:16]])
    asked: dict[str, Any] = {"max_new_tokens": 30, "seed": 3, "eos_token_id": ()}
    plain = generate(model, None, ids, **asked)
    for drafter in (
        MixtureDrafter([NgramDrafter(NgramConfig(1)), drafter_of("larger draft")]),
        CascadeDrafter(LMDraft(llama(300, 5)), drafter_of("larger draft")),
    ):
        out = generate(model, drafter, ids, num_draft_tokens=3, audit=True, **asked)
        assert torch.equal(out.sequences, plain.sequences)
        assert any(one.drafted for one in out.stats.rounds)
