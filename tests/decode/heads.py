"""Random heads on random targets, of every family that there is."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.drafters.base import Batch
from decode.drafters.head_draft import HeadDraft
from decode.drafters.saved_head import HEADS
from decode.models.hidden_states import FINAL, Taps
from decode.models.output_head import ends_of

DEPTH = 4
TAPS = dict.fromkeys(("eagle3", "dspark", "dflash2", "lilicorr", "peagle"), (0, 1, 4)) | {"exit_adapter": (1,)}
"""Of families that read several layers, the last one being the final state of a shallow target; the others read that
alone."""
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "hydra-prefix": ("hydra", {"prefix_attention": True}),
    "eagle3.1": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "eagle3-window": ("eagle3", {"draft_window": 3, "draft_sinks": 2}),
    "eagle3.1-one-norm": ("eagle3", {"norm_before_fc": True, "norm_output": True}),
    "peagle-one-layer": ("peagle", {"layers": 1, "mask_token": 7, "fc_norm": True}),
    "dflash": ("dspark", {"markov_rank": 0, "confidence": False, "layout": "fill_in"}),
    "jetspec": ("dspark", {"markov_rank": 0, "confidence": False, "layout": "fill_in", "causal": True}),
    "dflash2-causal": ("dflash2", {"causal": True, "conv_taps": 3, "conv_group": 8}),
    "lilicorr-convolved": ("lilicorr", {"conv_taps": 2, "conv_group": 8, "mask_token": 7, "lattice_width": 32}),
    "dspark-fill-in": ("dspark", {"layout": "fill_in", "mask_token": 7}),
}
VARIANTS = {family: (family, {}) for family in HEADS if family != "exit_adapter"} | {
    k: v for k, v in OPTIONS.items() if v[0] in HEADS
}
"""But for exit adapters, whose rounds are the target's own passes (test_exit_adapter.py)."""


def random_head(name: str, model: PreTrainedModel, seed: int = 0, vocab: Tensor | None = None) -> HeadDraft:
    """A head of the target's width with wide random weights, so that its distributions are far from uniform; families
    start some of their weights at zero."""
    family, options = VARIANTS.get(name, (name, {}))
    config_class, module = HEADS[family]
    text = model.config.get_text_config()
    known = {field.name for field in dataclasses.fields(config_class)}
    options = {
        "family": family,
        "markov_rank": 0 if family == "lilicorr" else 4,
        "layers": 2,
        "mlp_layers": 1,
        "anchors": 64,
        "confidence": family == "dspark",
        "layout": "anchor" if family == "dspark" else "fill_in",
        "candidates": 5,
        "lattice_width": 16,
        "factor_dim": 8,
        "logit_scale": 3.0,
    } | options
    config = config_class(
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        taps=tuple(tap if tap < text.num_hidden_layers else FINAL for tap in TAPS.get(family, (FINAL,))),
        depth=DEPTH,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp_width=2 * text.hidden_size,
        rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_positions=256,
        draft_vocab_size=None if vocab is None else len(vocab),
        **{name: value for name, value in options.items() if name in known},
    )
    torch.manual_seed(seed)
    head = module(config, ends_of(model), vocab).to(model.dtype)
    for weight in head.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3)
    return head.requires_grad_(False).eval()


def batch_of(model: PreTrainedModel, head: HeadDraft, texts: list[list[int]]) -> Batch:
    """A row for each text, padded, every token to be learned."""
    length = max(map(len, texts))
    ids = torch.zeros(len(texts), length, dtype=torch.long)
    document = torch.full_like(ids, -1)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        document[row, : len(text)] = 0
    return Batch(ids, torch.arange(length).expand_as(ids), document, document >= 0, features_of(model, head, ids))


def features_of(model: PreTrainedModel, head: HeadDraft, ids: Tensor) -> Tensor:
    """(B, T, n, d) of rows of one document each."""
    taps = Taps(model, head.config.taps)
    with torch.no_grad(), taps:
        model(ids, use_cache=False)
    return taps.stacked()
