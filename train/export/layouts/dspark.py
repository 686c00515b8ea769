"""DSpark as its authors publish it: DFlash's layers with a bias that the token before gives to the next one
(`markov_head`), and the chance that each token is accepted (`confidence_head`).

The mask is a token of the vocabulary here. A learned one becomes a row of its own behind the target's V, so that the
folder holds an embedding of V + 1 rows, and a bias of zeros for the new token. `confidence_head` reads [state, what
`markov_w1` knows of the token before].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from decode.common.checked_json import write_json
from decode.drafters.dspark import DSparkConfig
from train.export.layouts import blocks
from train.export.layouts.base import Layout, Spec
from train.export.source import Source

TEMPERATURES = "confidence_temperatures.json"


def config(source: Source) -> dict[str, Any]:
    """With the switches of both heads, which engines guess differently."""
    own, vocab = blocks.shape(source), source.target.vocab_size
    fields = blocks.fields(source, "dspark", own.mask_token, own.depth) | {
        "markov_rank": own.markov_rank or 1,
        "markov_head_type": "vanilla",
        "enable_confidence_head": own.confidence,
        "confidence_head_with_markov": own.markov_rank > 0,
        "shift_label": own.layout == "anchor",  # TensorRT-LLM's sample_from_anchor
    }
    if own.mask_token is None:
        fields |= {"vocab_size": vocab + 1, "target_vocab_size": vocab, "mask_token_id": vocab}
        fields["dflash_config"]["mask_token_id"] = vocab
    return {"architectures": ["Qwen3DSparkModel"]} | fields


def tensors(source: Source) -> dict[str, Tensor]:
    """The layers; the bias, zeros where the head has none; the chances, in float32 and with one temperature in them."""
    own = blocks.shape(source)
    held = blocks.tensors(source) | markov(source) | chances(source)
    if own.mask_token is None:
        held["embed_tokens.weight"] = torch.cat([source.embedding, source.weights["mask.weight"]])
        known = held["markov_head.markov_w1.weight"]
        held["markov_head.markov_w1.weight"] = torch.cat([known, known.new_zeros(1, known.shape[1])])
    return held


def markov(source: Source) -> dict[str, Tensor]:
    """The bias, of rank 1 and zero where the head has none: engines have no DSpark without one."""
    config = blocks.shape(source)
    drafted, weights = config.draft_vocab_size or config.vocab_size, source.weights
    if config.markov_rank:
        known, bias = weights["markov_in.weight"], weights["markov_out.weight"]
    else:
        known, bias = (weights["norm.weight"].new_zeros(size, 1) for size in (config.vocab_size, drafted))
    return {"markov_head.markov_w1.weight": known, "markov_head.markov_w2.weight": bias}


def chances(source: Source) -> dict[str, Tensor]:
    """Weights c of sigmoid(c x), with what the temperatures of all slots have in common: c / T."""
    config = blocks.shape(source)
    if not config.confidence:
        return {}
    common = common_temperature(config)
    state = source.head.state_dict()
    return {
        f"confidence_head.proj.{name}": state[f"confidence_head.{name}"].float() / common for name in ("weight", "bias")
    }


def common_temperature(config: DSparkConfig) -> float:
    """The geometric mean of the temperatures by slot, since engines other than SGLang have none."""
    return geometric_mean(config.temperatures) if config.temperatures else 1.0


def manifest(fields: Mapping[str, Any]) -> dict[str, Spec]:
    """The layers and both heads."""
    vocab, rank, width = fields["vocab_size"], fields["markov_rank"], fields["hidden_size"]
    specs = blocks.manifest(fields) | {
        "markov_head.markov_w1.weight": Spec((vocab, rank)),
        "markov_head.markov_w2.weight": Spec((fields.get("draft_vocab_size") or vocab, rank)),
    }
    if fields.get("enable_confidence_head"):
        read = width + rank * bool(fields.get("confidence_head_with_markov"))
        specs |= {
            "confidence_head.proj.weight": Spec((1, read), "float32"),
            "confidence_head.proj.bias": Spec((1,), "float32"),
        }
    return specs


def write_temperatures(source: Source, folder: Path) -> None:
    """What SGLang divides by, slot by slot, beside what the weights have been divided by already."""
    if source.is_calibrated:
        config = blocks.shape(source)
        common = common_temperature(config)
        write_json(folder / TEMPERATURES, {"temperatures": [each / common for each in config.temperatures]})


def note(source: Source) -> str:
    """What became of the temperatures."""
    if not source.is_calibrated:
        return ""
    config = blocks.shape(source)
    each = ", ".join(f"{one:.3g}" for one in config.temperatures)
    return (
        f"Its chances of acceptance were fitted by a temperature for each token of a block ({each}). Engines have "
        f"none: confidence_head is divided by {common_temperature(config):.3g}, their geometric mean. SGLang divides "
        f"by what is left of each, in {TEMPERATURES}."
    )


DSPARK = Layout("dspark", config, tensors, manifest, extras=write_temperatures, note=note)
