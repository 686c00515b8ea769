"""Attention masks for unmodified transformers models: who sees whom, said once as positions and a boolean rule.

sdpa takes a 4D boolean mask (True = attend). Eager attention adds whatever it is given, so a boolean mask would be
read as +1/0 without a word (measured error 2e-2 on a toy): eager gets an additive mask here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig


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
