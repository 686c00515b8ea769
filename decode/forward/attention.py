"""Who sees whom, and attention of few queries over many slots: query groups folded into the query axis, two matrix
products.

sdpa under a mask copies keys and values for every query head of a group, and on a CPU it walks the heads of a batch
with a product each. Measured on 2 cores (8 heads of 64, 256 slots, bfloat16): 32 rows of one token 3.9 ms with sdpa,
1.1 ms so; 16 rows of five tokens 1.1 against 0.6 ms; one row of five tokens 0.08 against 0.12 ms, which keeps sdpa.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def layer_masks(
    config: PretrainedConfig, visible: Tensor, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """The mask, or masks by layer type, that a model of this config wants.

    visible (B, T, S) bool, query_positions (B, T), key_positions (B, S): sliding layers further see only keys less than
    `sliding_window` positions back (by position, never by slot). Result: (B, 1, T, S), or a dict where layers differ.
    """
    text = config.get_text_config()
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
    if config._attn_implementation != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


NAME = "draftsmith_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """query (B, H, T, d), key and value (B, H_kv, S, d), mask (B, 1 or H, T, S), bool or added -> (B, T, H, d).

    Softmax in float32 or wider, as eager attention has it.
    """
    batch, heads, width, size = query.shape
    kv_heads, slots = key.shape[1:3]
    grouped = (query * (size**-0.5 if scaling is None else scaling)).reshape(batch, kv_heads, -1, size)
    scores = (grouped @ key.transpose(2, 3)).view(batch, heads, width, slots)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:  # a model's own biases, as Doge makes them
        scores = scores + attention_mask
    weights = scores.softmax(-1).to(value.dtype).view(batch, kv_heads, -1, slots)
    return (weights @ value).view(batch, heads, width, -1).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)


def pays(model: PreTrainedModel, batch_size: int) -> bool:
    """Whether short passes of this model are faster so: batches on a CPU, and groups of query heads anywhere.

    Only of models that leave attention to transformers' interface: Falcon looks for the name "sdpa" itself, and under
    any other adds the boolean mask to its scores, as 1 and 0.
    """
    if not model._supports_attention_backend:
        return False
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    is_grouped = (getattr(config, "num_key_value_heads", None) or heads) < heads
    return config._attn_implementation == "sdpa" and (is_grouped or (model.device.type == "cpu" and batch_size > 1))


@contextmanager
def grouped(model: PreTrainedModel) -> Iterator[None]:
    """The model attends so inside the block; its own setting is put back."""
    config = model.config.get_text_config()
    before = config._attn_implementation_internal
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before
