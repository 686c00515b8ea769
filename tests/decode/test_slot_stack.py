"""Caches that are laid out for the slots in use: growing in the middle of a call changes neither texts nor what drafts
know."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from decode import generate
from decode.drafters.base import Drafter
from decode.drafters.lm import LMDraft
from decode.forward.cache import SlotCache
from decode.forward.slot_stack import Shape, SlotStack, bucket
from decode.forward.target import CachedModel
from tests.decode.checks import check_cache, ragged_prompts
from tests.decode.heads import VARIANTS, random_head
from tests.tiers import by_default
from tests.tiny import MODELS, tiny_llama


def test_sizes_are_two_a_doubling() -> None:
    sizes = [bucket(end) for end in range(1, 1000)]
    assert sorted(set(sizes)) == [64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert all(end <= size for end, size in enumerate(sizes, 1))


def test_slots_in_use_lie_together_and_keep_what_they_hold() -> None:
    stack = SlotStack(3, Shape(2, 2, 4, torch.float32, torch.device("cpu")), 64)
    want = torch.randn(3, 2, 2, 64, 4)
    held = 0
    for slots in (8, 12, 64, 16, 24):
        stack.lay_out(slots)
        assert stack.view.is_contiguous()
        held = min(held, slots)
        assert torch.equal(stack.view[..., :held, :], want[..., :held, :])
        assert not stack.view[..., held:, :].any()
        stack.view[:] = want[..., :slots, :]
        held = slots


def test_a_long_row_that_has_left_is_no_longer_looked_at() -> None:
    model, tokens = MODELS["llama"](), torch.tensor([[5], [9]])
    runner = CachedModel(model, 2, 256)
    seen = []
    with torch.inference_mode():
        for start in (3, 70, 130, 100, 3):
            runner.chain(tokens, torch.tensor([[start], [2]]), start)
            seen.append(runner.cache.num_slots)
            assert all(layer.keys.is_contiguous() for layer in runner.cache.slot_layers)  # type: ignore[union-attr]
    assert seen == [64, 96, 192, 192, 64]


@pytest.mark.parametrize("name", by_default(1, ["gemma3", "llama"]))
def test_the_cache_is_that_of_a_fresh_prefill_however_often_it_has_grown(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.forward.slot_stack.FIRST_BUCKET", 4)
    laid, lay_out = [], SlotCache.lay_out

    def noted(cache: SlotCache, slots: int) -> None:
        laid.append((cache, slots))
        lay_out(cache, slots)

    monkeypatch.setattr(SlotCache, "lay_out", noted)
    check_cache("tree", name)
    last = [slots for cache, slots in laid if cache is laid[-1][0]]
    assert sum(before < after for before, after in pairwise(last)) > 3


@pytest.mark.parametrize("tree", by_default(1, ["2x2", "chain"]))
@pytest.mark.parametrize("name", by_default(2, ["lm", "eagle3", *(name for name in VARIANTS if name != "eagle3")]))
def test_drafts_know_what_they_have_read_however_often_their_cache_has_grown(
    name: str, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = ragged_prompts(2)
    found = []
    for first in (256, 8):
        monkeypatch.setattr("decode.forward.slot_stack.FIRST_BUCKET", first)
        model = tiny_llama(num_layers=3, dtype=torch.float64).requires_grad_(False)
        near = tiny_llama(num_layers=3, dtype=torch.float64).requires_grad_(False)
        near.lm_head.weight.data += 0.1 * torch.randn(
            near.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)
        )
        draft: Drafter = LMDraft(near) if name == "lm" else random_head(name, model)
        settings = {"num_draft_tokens": 2} if tree == "chain" else {"tree": tree}
        out = generate(model, draft, ids, mask, max_new_tokens=40, eos_token_id=(), seed=0, **settings)  # type: ignore[arg-type]
        found.append((out.sequences.tolist(), [vars(one) for one in out.stats.rounds]))
    assert found[0] == found[1]
