"""decode.overlap: the text is that of plain decoding, and what was drafted ahead keeps its distribution."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from decode import Conversation, generate
from decode.api import Output
from decode.drafters.base import Context
from decode.drafters.beside.ahead import AheadDrafter
from decode.drafters.beside.elsewhere import ElsewhereDrafter
from decode.drafters.lm import LMDraft
from decode.loop import Loop
from decode.requests import Request
from decode.trees.tree import Tree
from decode.trees.tree_plans import chain
from tests.decode import overlapped
from tests.decode.checks import check_pathwise_equality, ragged_prompts
from tests.decode.overlapped import PROMPT, VOCAB, draft, target
from tests.tiers import by_default
from tests.tiny import tiny_llama

call: Callable[..., Output] = partial(generate, seed=1, eos_token_id=(), max_new_tokens=30)
IDS = torch.tensor(PROMPT)
CASES = [
    (temperature, k, batch, rows, noise)
    for temperature in (1.0, 0.0)
    for batch, rows in ((1, None), (3, None), (5, 2))
    for k in (1, 2, 3, 4, 5)
    for noise in (0.0, 0.02)
]


@pytest.mark.parametrize("check", ["text", "distributions", "noise", "draws"])
def test_what_is_drafted_ahead_is_exact(check: str) -> None:
    getattr(overlapped, f"check_{check}")()


@pytest.mark.parametrize(("temperature", "k", "batch", "rows", "noise"), by_default(10, CASES))
def test_the_text_is_that_of_plain_decoding(
    temperature: float, k: int, batch: int, rows: int | None, noise: float
) -> None:
    settings = {"max_new_tokens": 20, "temperature": temperature, "num_draft_tokens": k, "batch_size": rows}
    out = check_pathwise_equality(target(), draft(noise), batch, overlap=True, audit=True, **settings)
    assert out.stats.ahead_share is not None
    if noise == 0 and batch == 1:
        rounds = [one.ahead for one in out.stats.rounds if one.ahead is not None]
        assert rounds == [False, *[True] * (len(rounds) - 1)]


@pytest.mark.parametrize(
    "settings",
    [
        {"strict": True},
        {"repetition_penalty": 1.3},
        {"top_k": 5, "temperature": 0.7},
        {"verifier": "rejection", "temperature": 0.0},
        {"verifier": "block", "temperature": 0.0},
    ],
    ids=str,
)
def test_so_it_is_with_other_settings(settings: dict[str, Any]) -> None:
    check_pathwise_equality(target(), draft(0.02), 2, overlap=True, max_new_tokens=20, **settings)


def test_what_a_thread_is_set_to_compute_in_its_other_half_computes_in() -> None:
    """Of autocast, which is a thread's own; packed weights in float32 besides."""
    model, drafter = tiny_llama(VOCAB), LMDraft(tiny_llama(VOCAB, seed=1))
    for settings in ({"enabled": False}, {"dtype": torch.bfloat16}):
        with torch.autocast("cpu", **settings):  # type: ignore[arg-type]
            plain = call(model, None, IDS, num_draft_tokens=2).sequences
            for draft_model in (drafter, LMDraft(model)):
                out = call(model, draft_model, IDS, num_draft_tokens=2, overlap=True)
                same = (out.sequences == plain).float().mean()
                assert same == 1 or ("dtype" in settings and same > 0.3), "bfloat16 may flip near-ties"


def test_texts_end_inside_what_was_assumed() -> None:
    free = call(target(), None, IDS).sequences[0].tolist()
    for at in range(3, 20):
        told = {"eos_token_id": free[at]}
        plain, ahead = call(target(), None, IDS, **told), call(target(), draft(0.0), IDS, overlap=True, **told)
        assert torch.equal(plain.sequences, ahead.sequences)
    for length in range(1, 14):
        out = call(target(), draft(0.0), IDS, overlap=True, max_new_tokens=length)
        assert out.sequences[0].tolist() == free[: 3 + length]


def test_nothing_is_drafted_beyond_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, propose = [], LMDraft.propose

    def noted(self: LMDraft, context: Context) -> Tree:
        reached.append((int(context.lengths.max()), context.is_undecided))
        return propose(self, context)

    monkeypatch.setattr(LMDraft, "propose", noted)
    call(target(), draft(0.0), IDS, overlap=True, num_draft_tokens=3, max_new_tokens=9)
    assert reached == [(3, False), (6, True)]  # rounds of 4, 4 and 1 tokens


def test_a_draft_with_a_shorter_context_stops_where_it_ends() -> None:
    short = overlapped.tiny_llama(64, dtype=torch.float64, max_position_embeddings=16)
    out = check_pathwise_equality(target(), LMDraft(short), 2, overlap=True, max_new_tokens=30)
    assert out.stats.rounds[-1].drafted == 0


def test_a_target_may_be_its_own_draft() -> None:
    check_pathwise_equality(target(), LMDraft(target()), 1, overlap=True, max_new_tokens=20)


def test_a_conversation_goes_on() -> None:
    told, plain = Conversation(), Conversation()
    ids = IDS
    for _ in range(3):
        want = call(target(), None, ids, conversation=plain).sequences
        assert torch.equal(call(target(), draft(0.02), ids, conversation=told, overlap=True).sequences, want)
        ids = torch.cat([want, IDS], 1)


def test_a_draft_elsewhere_drafts_the_same() -> None:
    """Here `elsewhere` is the same CPU: what is moved stays what it is."""
    ids, _ = ragged_prompts(2)
    for verifier in ("coupled", "rejection"):
        request = Request(ids.tolist(), 20, verifier=verifier, shape=chain(3), seed=1, audit=True)
        for wrap in (lambda one: one, AheadDrafter):
            here, there = (
                Loop(target(), wrap(one), request).run() for one in (draft(0.02), ElsewhereDrafter(draft(0.02)))
            )
            assert here[0] == there[0]
            assert here[1].rounds == there[1].rounds


@pytest.mark.slow
def test_tokens_follow_the_target_over_rounds_drafted_ahead() -> None:
    """Of 1500 seeds, the two tokens behind a round of one draft (G statistic of 16 pairs, threshold of 1e-9 at 15
    degrees)."""
    model, near = (overlapped.tiny_llama(4, dtype=torch.float64, initializer_range=0.15) for _ in range(2))
    with torch.no_grad():
        for weight in near.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    prompt, counts, ahead = [2, 1], torch.zeros(4, 4, 4, 4), 0
    for seed in range(1500):
        request = Request([prompt], 4, verifier="rejection", shape=chain(1), seed=seed, overlap=True)
        (tokens,), stats = Loop(model, LMDraft(near), request).run()
        counts[tuple(tokens[2:])] += 1
        ahead += stats.rounds[1].ahead is True
    assert ahead > 300
    expected = torch.ones(4, 4, 4, 4, dtype=torch.float64)
    for text in torch.cartesian_prod(*[torch.arange(4)] * 4):
        rows = model(torch.tensor([[*prompt, *text.tolist()]])).logits[0, 1:-1].softmax(-1)
        expected[tuple(text.tolist())] = rows[torch.arange(4), text].prod()
    seen, want = counts.double().sum((0, 1)), expected.sum((0, 1)) * 1500
    assert 2 * (seen * (seen.clamp(min=1) / want).log()).sum() < 75


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_draft_on_a_second_gpu_changes_nothing(overlap: bool) -> None:
    models: list[Any] = [overlapped.tiny_llama(64, dtype=torch.float64) for _ in range(2)]
    model, near = (one.to(f"cuda:{place}") for place, one in enumerate(models))
    ids = IDS.to("cuda:0")
    plain = call(model, None, ids, max_new_tokens=60)
    out = call(model, LMDraft(near), ids, max_new_tokens=60, overlap=overlap)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.tau > 4
