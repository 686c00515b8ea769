"""Who sees whom, and attention that keeps the query heads of a group together, where sdpa under a mask would be given
keys and values copied for each of them: folded, by sdpa itself, or by two matrix products.

Which of the two is faster is a matter of the machine's libraries. Measured with 8 heads of 64 in bfloat16, a layer: 16
rows of one token over 96 slots 0.24 ms folded and 0.48 ms by products, of five tokens 0.80 and 0.78, one row of five
0.06 and 0.14 (one core of an Intel); 32 rows of one token over 256 slots 3.9 and 1.1 ms (two cores of an AMD). With
gradients, a row of 512 tokens, 16 heads of 128 over 8 groups: 24 ms folded, 35 by sdpa's `enable_gqa`, 40 over copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decode.forward.window import own_window


def layer_masks(
    config: PretrainedConfig, visible: Tensor, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """The mask, or masks by layer type, that a model of this config wants.

    visible (B, T, S) bool, query_positions (B, T), key_positions (B, S): sliding layers further see only keys less than
    `sliding_window` positions back (by position, never by slot), and all layers of a draft that was trained with a
    window its own. Result: (B, 1, T, S), or a dict where layers differ.
    """
    text = config.get_text_config()
    own = own_window(config)
    if own is not None:
        visible = visible & own.sees(query_positions, key_positions)
    kinds = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    slides = getattr(text, "use_sliding_window", True)
    full = _as_attention_wants(visible, text, dtype)
    if window is None or not slides or kinds == {"full_attention"}:
        return full
    near = (query_positions[:, :, None] - key_positions[:, None, :]) < window
    sliding = _as_attention_wants(visible & near, text, dtype)
    if "full_attention" in kinds:
        return {"full_attention": full, "sliding_attention": sliding}
    return sliding


def packed_visibility(document: Tensor) -> Tensor:  # (B, T) -> (B, T, T) bool
    """Causal attention inside each document of a packed row; padding (document -1) sees itself, so that no row is
    empty."""
    order = torch.arange(document.shape[1], device=document.device)
    causal = order[:, None] >= order[None, :]
    same = document[:, :, None] == document[:, None, :]
    alone = torch.eye(len(order), dtype=torch.bool, device=document.device)
    return (same & causal & (document >= 0)[:, :, None]) | alone


def _as_attention_wants(visible: Tensor, config: PretrainedConfig, dtype: torch.dtype) -> Tensor:
    mask = visible[:, None]
    is_training, device = torch.is_grad_enabled(), mask.device.type
    if config._attn_implementation != "eager" and device != "cpu" and not is_training:
        return mask  # on a CPU every layer would make numbers of it: 12 of the 35 us of one row's attention
    if is_training and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # else every layer keeps its own for its backward pass: by arithmetic 15 GB in a PARD draft of 30
        dtype = torch.get_autocast_dtype(device)
    # not in place: what was written into is computed by every layer of a capture again
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


Attend = Callable[..., tuple[Tensor, None]]
"""As transformers calls it: module, query (B, H, T, d), key and value (B, H_kv, S, d), mask (B, 1 or H, T, S), bool or
added -> (B, T, H, d)."""


def folded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """As transformers calls `fold`."""
    return fold(query, key, value, attention_mask, scaling), None


def fold(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None
) -> Tensor:  # (B, T, H, d)
    """By sdpa, the queries of a group one after another as if they were tokens.

    Never by its `enable_gqa`: with a mask CUDA's fast kernels refuse that, and what is left writes down all scores in
    float32. Folding copies the mask for each query of a group; on a GPU, where that is more, keys and values instead.
    """
    batch, heads, width, size = query.shape
    if heads > key.shape[1] and width > key.shape[1] * size and query.device.type != "cpu":
        key, value = (one.repeat_interleave(heads // key.shape[1], 1) for one in (key, value))
    kv_heads, slots = key.shape[1:3]
    queries = query.reshape(batch, kv_heads, -1, size)
    if attention_mask.shape[1] == 1:
        mask = attention_mask.repeat(1, 1, heads // kv_heads, 1) if heads > kv_heads and width > 1 else attention_mask
    else:
        mask = attention_mask.expand(batch, heads, width, slots).reshape(batch, kv_heads, -1, slots)
    mixed = scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scaling)
    return mixed.reshape(batch, heads, width, -1).transpose(1, 2).contiguous()


def by_products(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """By two matrix products and a softmax, which sums in float32 or wider."""
    batch, heads, width, size = query.shape
    kv_heads, slots = key.shape[1:3]
    queries = (query * (size**-0.5 if scaling is None else scaling)).reshape(batch, kv_heads, -1, size)
    scores = (queries @ key.transpose(2, 3)).view(batch, heads, width, slots)
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask
    weights = scores.softmax(-1).view(batch, kv_heads, -1, slots)
    return (weights @ value).view(batch, heads, width, -1).transpose(1, 2).contiguous(), None


WAYS: dict[str, Attend] = {"draftsmith_folded": folded, "draftsmith_products": by_products}
for name, way in WAYS.items():
    ALL_ATTENTION_FUNCTIONS.register(name, way)


def short_way(model: PreTrainedModel, batch_size: int) -> str | None:
    """How short passes of this model attend, a name in `WAYS`; None is the model's own sdpa.

    A model whose queries come in groups never copies keys for them; others keep their own on a GPU, and on a CPU for
    one row, where it is the fastest everywhere.
    """
    if not _can_choose(model):
        return None
    if model.device.type != "cpu":
        return "draftsmith_products" if _is_grouped(model) else None
    if batch_size > 1 and products_are_faster(model.dtype):
        return "draftsmith_products"
    return long_way(model)


def long_way(model: PreTrainedModel) -> str | None:
    """The same for prompts, of which products would write down all scores; on a GPU so would the folded masks."""
    wanted = _can_choose(model) and _is_grouped(model) and model.device.type == "cpu"
    return "draftsmith_folded" if wanted else None


def _can_choose(model: PreTrainedModel) -> bool:
    """Only models that leave attention to transformers' interface: Falcon looks for the name "sdpa" itself, and under
    any other adds the boolean mask to its scores, as 1 and 0."""
    return model._supports_attention_backend and model.config.get_text_config()._attn_implementation == "sdpa"


def _is_grouped(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    return (getattr(config, "num_key_value_heads", None) or heads) < heads


CLEARLY = 1.5
"""So many times as fast: what one process finds, all on this machine do, and texts do not differ between them."""


@cache
def products_are_faster(dtype: torch.dtype) -> bool:
    """Whether batches on this CPU attend faster by products than folded: measured once in a process, in 10 ms."""
    rows, heads, slots, size = 16, 8, 128, 64
    query, key = torch.zeros(rows, heads, 1, size, dtype=dtype), torch.zeros(rows, heads, slots, size, dtype=dtype)
    mask, module = torch.zeros(rows, 1, 1, slots, dtype=dtype), nn.Module()
    best = dict.fromkeys(WAYS, float("inf"))
    for _ in range(8):  # in turns, and the fastest of each: others may be using the machine
        for name, way in WAYS.items():
            began = time.perf_counter()
            way(module, query, key, key, mask)
            best[name] = min(best[name], time.perf_counter() - began)
    return best["draftsmith_products"] * CLEARLY < best["draftsmith_folded"]


@contextmanager
def attending(model: PreTrainedModel, name: str | None) -> Iterator[None]:
    """The model attends so inside the block; its own setting is put back."""
    config = model.config.get_text_config()
    before = config._attn_implementation_internal
    try:
        if name is not None:
            config._attn_implementation_internal = name
        yield
    finally:
        config._attn_implementation_internal = before
