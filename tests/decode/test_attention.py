"""Ways to attend: the numbers of sdpa over copied keys, and which models take which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import FalconConfig, FalconForCausalLM

from decode import generate
from decode.drafters.layers import Attention, Rotary
from decode.forward.attention import WAYS, attending, layer_masks, long_way, products_are_faster, short_way
from tests.decode.heads import VARIANTS, batch_of, random_head
from tests.tiers import by_default
from tests.tiny import tiny_llama

ROWS, HEADS, TOKENS, SLOTS, SIZE = 2, 6, 3, 7, 4
MASKS = {
    "seen": torch.rand(ROWS, 1, TOKENS, SLOTS, generator=torch.Generator().manual_seed(0)) > 0.5,
    "added": torch.rand(ROWS, 1, TOKENS, SLOTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "of every head": torch.rand(
        ROWS, HEADS, TOKENS, SLOTS, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ),
}
MASKS["seen"][..., 0] = True


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_numbers_of_copied_keys(way: str, mask: str, kv_heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(ROWS, HEADS, TOKENS, SIZE, dtype=torch.float64)
    key, value = torch.randn(2, ROWS, kv_heads, SLOTS, SIZE, dtype=torch.float64)
    copies = (one.repeat_interleave(HEADS // kv_heads, 1) for one in (key, value))
    want = scaled_dot_product_attention(query, *copies, attn_mask=MASKS[mask], scale=0.3).transpose(1, 2)
    have, _ = WAYS[way](nn.Module(), query, key, value, MASKS[mask], scaling=0.3)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


def test_grouped_queries_never_have_their_keys_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, grouped = (tiny_llama(num_heads=4, num_key_value_heads=heads) for heads in (4, 2))
    for faster in (False, True):
        monkeypatch.setattr("decode.forward.attention.products_are_faster", lambda dtype, faster=faster: faster)
        batch = "draftsmith_products" if faster else None
        assert (short_way(plain, 1), short_way(plain, 4), long_way(plain)) == (None, batch, None)
        assert short_way(grouped, 1) == long_way(grouped) == "draftsmith_folded"
        assert short_way(grouped, 4) == (batch or "draftsmith_folded")


def test_a_model_that_looks_for_the_name_of_its_attention_keeps_it() -> None:
    config = FalconConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=64)
    model = FalconForCausalLM(config).eval()
    assert short_way(model, 4) is long_way(model) is None


def test_a_process_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    products_are_faster.cache_clear()
    calls: list[None] = []
    real = WAYS["draftsmith_folded"]
    monkeypatch.setitem(WAYS, "draftsmith_folded", lambda *args: calls.append(None) or real(*args))
    first = products_are_faster(torch.float32)
    taken = len(calls)
    assert taken
    assert products_are_faster(torch.float32) == first
    assert len(calls) == taken


def test_a_failing_pass_leaves_the_model_its_own_attention() -> None:
    model = tiny_llama()
    with pytest.raises(ZeroDivisionError), attending(model, "draftsmith_folded"):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


def test_masks_are_numbers_where_every_layer_would_make_them() -> None:
    model = tiny_llama()
    seen, at = torch.ones(1, 2, 3, dtype=torch.bool), torch.arange(3)[None]
    made = layer_masks(model.config, seen, at[:, 1:], at, model.dtype)
    assert isinstance(made, Tensor)
    assert made.dtype == model.dtype
    meta = layer_masks(model.config, seen.to("meta"), at[:, 1:].to("meta"), at.to("meta"), model.dtype)
    assert isinstance(meta, Tensor)
    assert meta.dtype == torch.bool


class Kernels(TorchFunctionMode):
    """A machine whose fast kernels take a mask or groups of queries, never both: with the pair CUDA falls back to one
    that writes down all scores in float32. Notes the shapes of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[torch.Size] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is scaled_dot_product_attention:
            assert given.get("attn_mask") is None or not given.get("enable_gqa"), "a mask and groups at once"
            self.keys.append(args[1].shape)
        return func(*args, **given)


@pytest.mark.parametrize("name", by_default(3, VARIANTS))
def test_no_head_asks_for_a_mask_and_groups_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)
    target = tiny_llama(num_heads=4, num_key_value_heads=2).requires_grad_(False)
    head = random_head(name, target)
    text = list(range(40))
    with Kernels() as seen:
        for step in head.unroll(batch_of(target, head, [text])):
            step.head(step.hidden)
        generate(target, head, torch.tensor([text]), max_new_tokens=6, eos_token_id=(), seed=0)
    assert seen.keys


@pytest.mark.parametrize(("width", "copied"), [(1, False), (5, False), (16, False), (17, True), (100, True)])
def test_keys_are_copied_on_a_card_where_that_is_less_than_copies_of_the_mask(width: int, copied: bool) -> None:
    layer = Attention(32, 4, 2, 8, Rotary(8, {"rope_type": "default", "rope_theta": 1e4}, 256)).to("meta")
    x, positions = torch.empty(2, width, 32, device="meta"), torch.empty(2, width, dtype=torch.long, device="meta")
    visible = torch.empty(1, width, width, dtype=torch.bool, device="meta")
    with Kernels() as seen:
        layer(x, positions, lambda keys, values: (keys, values, visible))
    assert seen.keys == [(2, 4 if copied else 2, width, 8)]
