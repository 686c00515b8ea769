"""Medusa heads in one folder that vLLM and TGI read. Ours share the target's own output head.

    0.0.linear.weight (d, d)  and .bias (d,)     the first residual layer of the head that drafts the first token
    0.1.linear.*, ..., 1.0.linear.*, ...         its next layers, the next head
    lm_heads.0.weight (V_draft, d)               rows of the target's output head, once for all heads (vLLM)
    token_map (V_draft,) int64                   the target's id of each, ascending; a reduced vocabulary alone (vLLM)

The names are those of published heads (FasterDecoding), which vLLM maps to its own from 0.27 on. TGI finds no output
head behind each head's layers, and then reads all of them with the target's own (layers/medusa.py, MedusaHeadV2). A
name that the target has too, `lm_head.weight` say, would stop TGI; and where config.json holds `architectures`, TGI
loads no heads at all (layers/speculative.py), while vLLM does without that key. vLLM takes every key that holds "num"
with "heads" or "layers" for the number of heads or of their layers, so no such key of attention is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from decode.drafters.medusa import MedusaConfig
from train.export.layouts.base import Layout, Spec
from train.export.source import Source


def config(source: Source) -> dict[str, Any]:
    """config.json; TGI reads the three keys from `medusa_num_heads` on."""
    head, name = cast(MedusaConfig, source.config), str(source.weight_dtype).removeprefix("torch.")
    return {
        "model_type": "medusa",
        "medusa_num_heads": head.depth,
        "medusa_num_layers": head.mlp_layers,
        "base_model_name_or_path": _target(source.target.path),
        "version": "2",
        "hidden_size": head.hidden_size,
        "original_lm_head": not head.own_heads,
        "medusa_fc_bias": head.bias,
        "logit_scale": 1.0,
        "vocab_size": head.vocab_size,
        "truncated_vocab_size": head.draft_vocab_size or head.vocab_size,
        "dtype": name,
        "torch_dtype": name,
    }


def tensors(source: Source) -> dict[str, Tensor]:
    """Ours but for `heads.` before each name, with the output head's rows and the draft vocabulary; an output head that
    each head has of its own stands behind its layers."""
    head = cast(MedusaConfig, source.config)
    weights = {_name(name, head.mlp_layers): one for name, one in source.weights.items()}
    if not head.own_heads:
        weights["lm_heads.0.weight"] = source.output_rows
    vocab = weights.pop("vocab", None)
    return weights if vocab is None or len(vocab) == source.config.vocab_size else weights | {"token_map": vocab}


def _name(ours: str, layers: int) -> str:
    return re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{layers}.", ours.removeprefix("heads."))


def manifest(fields: Mapping[str, Any]) -> dict[str, Spec]:
    """The tensors that config.json calls for: one output head, or one each where `original_lm_head` is not set."""
    width, heads, layers = fields["hidden_size"], number_of(fields, "heads"), number_of(fields, "layers")
    vocab, drafted = fields["vocab_size"], fields.get("truncated_vocab_size") or fields["vocab_size"]
    made: dict[str, Spec] = {}
    for head in range(heads):
        for layer in range(layers):
            made[f"{head}.{layer}.linear.weight"] = Spec((width, width))
            if fields.get("medusa_fc_bias"):
                made[f"{head}.{layer}.linear.bias"] = Spec((width,))
        if not fields.get("original_lm_head"):
            made[f"{head}.{layers}.weight"] = Spec((vocab, width))
    if fields.get("original_lm_head"):
        made["lm_heads.0.weight"] = Spec((drafted, width))
    return made | ({"token_map": Spec((drafted,), "int64")} if drafted < vocab else {})


def number_of(fields: Mapping[str, Any], what: str) -> int:
    """Of heads or layers, by any of the names that vLLM takes for it."""
    return next(value for name, value in fields.items() if "num" in name and what in name)


def _target(path: str) -> str:
    """TGI opens it from its own working directory."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


MEDUSA = Layout("medusa", config, tensors, manifest, weights="medusa_lm_head.safetensors")
