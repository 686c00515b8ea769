"""DSpark (deepseek-ai): DFlash's layers with a bias that the token before gives to the next one, and the chance that
each token is accepted.

    markov_head.markov_w1.weight (V, r), .markov_w2.weight (V_draft, r)
    confidence_head.proj.weight (1, d + r), .bias    over [state, what markov_w1 knows of the token before]

The mask is a token of the vocabulary here. A learned one becomes a row of its own behind the target's V, so that the
folder holds an embedding of V + 1 rows, and a bias of zeros for the new token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from decode.common.checked_json import write_json
from decode.drafters.dspark import DSparkConfig
from decode.drafters.head_config import HeadConfig
from decode.formats import blocks
from decode.formats.base import EMBEDDING, Get, Layout, Reader, Spec
from decode.formats.blocks import BIAS, CHANCE, KNOWN
from decode.formats.folder import PublishedFolder
from decode.formats.mask import MASK_ID
from decode.models.describe import ModelDescription

if TYPE_CHECKING:
    from decode.formats.source import Source

TEMPERATURES = "confidence_temperatures.json"


def read_config(folder: PublishedFolder, target: ModelDescription) -> HeadConfig:
    """`block_size` is what is drafted, and in the speculators library the slots of a block; left out,
    `sample_from_anchor` is true, there false (vLLM 0.32, configs/speculators/algos.py)."""
    folder.only({"markov_head_type": "vanilla"}, "its bias is made by gates or a recurrent state")
    anchor = folder.setting("sample_from_anchor")
    is_anchor = not folder.is_speculators if anchor is None else anchor
    depth = folder.needed("block_size")[0] - (folder.is_speculators and not is_anchor)
    rank = folder.stored[folder.named(KNOWN)].shape[-1]
    if rank == 1 and not folder.tensor(folder.named(BIAS)).any():
        rank = 0  # engines have no DSpark without a bias, so that one of zeros is written
    has_chance = f"{CHANCE}weight" in folder.plain_names
    return blocks.read_blocks(folder, target, depth, is_anchor, markov_rank=rank, confidence=has_chance)


def read_tensors(folder: PublishedFolder, config: HeadConfig, get: Get) -> dict[str, Tensor]:
    """DFlash's, and those of both heads under our names."""
    own, held = cast(DSparkConfig, config), blocks.read_tensors(folder, config, get)
    if own.markov_rank:
        held["markov_in.weight"] = get(folder.named(KNOWN))[: config.vocab_size]
        held["markov_out.weight"] = get(folder.named(BIAS))
    return held | (_chance(own, folder.plain_names, get) if own.confidence else {})


def _chance(config: DSparkConfig, names: dict[str, str], get: Get) -> dict[str, Tensor]:
    """Of [state, what the bias knows]; without the second (`confidence_head_with_markov`) its weights are zeros, and so
    is a bias that is not there."""
    weight = get(names[f"{CHANCE}weight"])
    extra = config.hidden_size + config.markov_rank - weight.shape[-1]
    if extra == config.markov_rank:
        weight = pad(weight, (0, extra))
    elif extra == -1:
        weight = weight[:, : config.hidden_size]  # of the rank that stands for none
    bias = get(names[f"{CHANCE}bias"]) if f"{CHANCE}bias" in names else weight.new_zeros(1)
    return {"confidence_head.weight": weight, "confidence_head.bias": bias}


def written_config(source: Source) -> dict[str, Any]:
    """With the switches of both heads, which engines guess differently."""
    own, vocab = source.block, source.target.vocab_size
    fields = blocks.written_blocks(source, "dspark", own.mask_token, own.depth) | {
        "markov_rank": own.markov_rank or 1,
        "markov_head_type": "vanilla",
        "enable_confidence_head": own.confidence,
        "confidence_head_with_markov": own.markov_rank > 0,
        "shift_label": own.layout == "anchor",  # TensorRT-LLM's sample_from_anchor
    }
    if own.mask_token is None:
        fields |= {"vocab_size": vocab + 1, "target_vocab_size": vocab, MASK_ID: vocab}
        fields["dflash_config"][MASK_ID] = vocab
    return {"architectures": ["Qwen3DSparkModel"]} | fields


def written_tensors(source: Source) -> dict[str, Tensor]:
    """The layers; the bias, zeros where the head has none; the chances, in float32 and with one temperature in them."""
    own = source.block
    held = blocks.written_tensors(source) | _markov(source) | _chances(source)
    if own.mask_token is None:
        held[EMBEDDING] = torch.cat([source.embedding, source.weights["mask.weight"]])
        known = held[KNOWN]
        held[KNOWN] = torch.cat([known, known.new_zeros(1, known.shape[1])])
    return held


def _markov(source: Source) -> dict[str, Tensor]:
    """The bias, of rank 1 and zero where the head has none: engines have no DSpark without one."""
    config = source.block
    drafted, weights = config.draft_vocab_size or config.vocab_size, source.weights
    if config.markov_rank:
        known, bias = weights["markov_in.weight"], weights["markov_out.weight"]
    else:
        known, bias = (weights["norm.weight"].new_zeros(size, 1) for size in (config.vocab_size, drafted))
    return {KNOWN: known, BIAS: bias}


def _chances(source: Source) -> dict[str, Tensor]:
    """Weights c of sigmoid(c x), with what the temperatures of all slots have in common: c / T."""
    config = source.block
    if not config.confidence:
        return {}
    common = common_temperature(config)
    state = source.head.state_dict()
    return {f"{CHANCE}{name}": state[f"confidence_head.{name}"].float() / common for name in ("weight", "bias")}


def common_temperature(config: DSparkConfig) -> float:
    """The geometric mean of the temperatures by slot, since engines other than SGLang have none."""
    return geometric_mean(config.temperatures) if config.temperatures else 1.0


def manifest(fields: Mapping[str, Any]) -> dict[str, Spec]:
    """The layers and both heads."""
    vocab, rank, width = fields["vocab_size"], fields["markov_rank"], fields["hidden_size"]
    specs = blocks.manifest(fields) | {
        KNOWN: Spec((vocab, rank)),
        BIAS: Spec((fields.get("draft_vocab_size") or vocab, rank)),
    }
    if fields.get("enable_confidence_head"):
        read = width + rank * bool(fields.get("confidence_head_with_markov"))
        specs |= {
            f"{CHANCE}weight": Spec((1, read), "float32"),
            f"{CHANCE}bias": Spec((1,), "float32"),
        }
    return specs


def write_temperatures(source: Source, folder: Path) -> None:
    """What SGLang divides by, slot by slot, beside what the weights have been divided by already."""
    if source.is_calibrated:
        config = source.block
        common = common_temperature(config)
        write_json(folder / TEMPERATURES, {"temperatures": [each / common for each in config.temperatures]})


def note(source: Source) -> str:
    """What became of the temperatures."""
    if not source.is_calibrated:
        return ""
    config = source.block
    each = ", ".join(f"{one:.3g}" for one in config.temperatures)
    return (
        f"Its chances of acceptance were fitted by a temperature for each token of a block ({each}). Engines have "
        f"none: confidence_head is divided by {common_temperature(config):.3g}, their geometric mean. SGLang divides "
        f"by what is left of each, in {TEMPERATURES}."
    )


DSPARK = Layout(
    "dspark",
    written_config,
    written_tensors,
    manifest,
    Reader(read_config, read_tensors, blocks.read_ends),
    extras=write_temperatures,
    note=note,
    most=lambda fields: fields["block_size"],
)
