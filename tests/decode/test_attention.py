"""Ways to attend: the numbers of sdpa over copied keys, and which models take which."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import FalconConfig, FalconForCausalLM

from decode.forward.attention import WAYS, attending, layer_masks, long_way, products_are_faster, short_way
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
