"""Medusa heads: those of their authors (FasterDecoding, `medusa_lm_head.pt`), of TGI (`medusa_lm_head.safetensors`),
and by vLLM's own names.

    0.0.linear.weight (d, d), .bias (d,)   residual layer 0 of head 0; also blocks.0.layers.0.weight
    0.1.weight (V, d)                      its output head, behind its layers; also lm_heads.0.weight
    lm_head.weight (V_draft, d)            one for all heads, the target's (`original_lm_head`); written as
                                           lm_heads.0.weight (vLLM)
    token_map (V_draft,) int64             of a reduced vocabulary (vLLM)

The authors' config.json says neither width nor vocabulary, and some say fewer heads than the file holds
(medusa-vicuna-7b-v1.3: 2 of 5), so that all of this is counted in the file.

What is written is one folder that vLLM and TGI read. Its names are those of published heads, which vLLM maps to its own
from 0.27 on. TGI finds no output head behind each head's layers, and then reads all of them with the target's own
(layers/medusa.py, MedusaHeadV2). A name that the target has too, `lm_head.weight` say, would stop TGI; and where
config.json holds `architectures`, TGI loads no heads at all (layers/speculative.py), while vLLM does without that key.
vLLM takes every key that holds "num" with "heads" or "layers" for the number of heads or of their layers, so no such
key of attention is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from decode.common.errors import InputError
from decode.drafters.head_config import HeadConfig
from decode.drafters.medusa import MedusaConfig
from decode.formats.base import OUTPUT, Get, Layout, Reader, Spec, check_sizes, named_target, precision
from decode.formats.folder import PublishedFolder
from decode.formats.vocabulary import IDS, picked, vocabulary_of
from decode.models.describe import ModelDescription
from decode.models.hidden_states import FINAL

if TYPE_CHECKING:
    from decode.formats.source import Source

SHARED = "lm_heads.0.weight"
_RENAMES = (
    (re.compile(r"^(?:medusa_heads\.|heads\.)"), ""),
    (re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$"), r"\1.\2.linear.\3"),
    (re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$"), r"heads.\1.\2.linear.\3"),
    (re.compile(r"^(\d+)\.\d+\.weight$"), r"lm_heads.\1.weight"),
)
_LAYER = re.compile(r"^heads\.(\d+)\.(\d+)\.linear\.weight$")
_OUTPUT = re.compile(r"^lm_heads\.(\d+)\.weight$")
MOST = 256
"""Heads, and layers of each: a number in a name makes no room for a billion of them."""
UNUSED = {"heads": 1, "kv_heads": 1, "head_dim": 2, "mlp_width": 1, "rms_norm_eps": 0.0}
"""Fields of attention, of which these heads have none."""


def read_config(folder: PublishedFolder, target: ModelDescription) -> HeadConfig:
    """Counted in the file, and compared with what config.json says."""
    names = _names(folder)
    places = [match for name in names if (match := _LAYER.match(name))]
    depth, layers = (1 + max(int(match[group]) for match in places) for group in (1, 2))
    if {(head, number) for head in range(min(depth, MOST)) for number in range(min(layers, MOST))} != {
        (int(match[1]), int(match[2])) for match in places
    }:
        raise InputError(
            f"{folder.path} holds {len(places)} residual layers of Medusa heads, and {depth} heads of {layers} layers "
            f"by their numbers ({MOST} at most): some are missing. Fetch the folder again"
        )
    told = folder.written.get("medusa_num_heads")
    if told is not None and told > depth:
        raise InputError(
            f"{folder.path}/config.json says medusa_num_heads={told}, and the file holds {depth} heads: the others are "
            "lost. Fetch the folder again"
        )
    folder.only({"medusa_num_layers": layers, "logit_scale": 1.0}, "it would be read with layers or scores missing")
    width = folder.stored[names["heads.0.0.linear.weight"]].shape[0] if "heads.0.0.linear.weight" in names else 0
    check_sizes(folder, width, _rows(folder) or target.vocab_size, target)
    ids = vocabulary_of(folder, target.vocab_size)
    return MedusaConfig(
        hidden_size=width,
        vocab_size=target.vocab_size,
        taps=(FINAL,),
        depth=depth,
        rope={"rope_type": "default", "rope_theta": 1e4},
        max_positions=target.max_positions,
        draft_vocab_size=None if ids is None else len(ids),
        mlp_layers=layers,
        bias="heads.0.0.linear.bias" in names,
        own_heads=_shared(folder) is None and any(map(_OUTPUT.match, names)),
        **UNUSED,
    )


def read_tensors(folder: PublishedFolder, config: HeadConfig, get: Get) -> dict[str, Tensor]:
    """By our names; rows of output heads in the order of ascending tokens, and of the drafted ones alone."""
    left_out = {IDS, _shared(folder)}
    held = {ours: get(theirs) for ours, theirs in _names(folder).items() if theirs not in left_out}
    ids = vocabulary_of(folder, config.vocab_size)
    if ids is None:
        return held
    order = ids.argsort()
    for name, rows in held.items():
        if _OUTPUT.match(name):  # vLLM takes heads of all tokens, and of the drafted ones
            held[name] = picked(rows, ids[order] if len(rows) == config.vocab_size else order)
    return held | {"vocab": ids[order]}


def _names(folder: PublishedFolder) -> dict[str, str]:
    """Our name of each tensor -> its own."""
    found = {}
    for theirs in folder.stored:
        ours = theirs
        for pattern, replacement in _RENAMES:
            ours = pattern.sub(replacement, ours)
        found[ours] = theirs
    return found


def _rows(folder: PublishedFolder) -> int | None:
    """Tokens of the target, by config.json or by an output head of all of them."""
    told = folder.written.get("vocab_size")
    if told is not None or IDS in folder.stored:
        return told
    heads = [theirs for ours, theirs in _names(folder).items() if _OUTPUT.match(ours) or ours == OUTPUT]
    return next((folder.stored[name].shape[0] for name in heads), None)


def _shared(folder: PublishedFolder) -> str | None:
    """The one output head of all heads, which is the target's."""
    names = _names(folder)
    if OUTPUT in names:
        return names[OUTPUT]
    return names.get(SHARED) if folder.written.get("original_lm_head") else None


def written_config(source: Source) -> dict[str, Any]:
    """TGI reads the three keys from `medusa_num_heads` on."""
    head = cast(MedusaConfig, source.config)
    return {
        "model_type": "medusa",
        "medusa_num_heads": head.depth,
        "medusa_num_layers": head.mlp_layers,
        "base_model_name_or_path": named_target(source),
        "version": "2",
        "hidden_size": head.hidden_size,
        "original_lm_head": not head.own_heads,
        "medusa_fc_bias": head.bias,
        "logit_scale": 1.0,
        "vocab_size": head.vocab_size,
        "truncated_vocab_size": head.draft_vocab_size or head.vocab_size,
        **precision(source.weight_dtype),
    }


def written_tensors(source: Source) -> dict[str, Tensor]:
    """Ours but for `heads.` before each name, with the output head's rows and the draft vocabulary; an output head that
    each head has of its own stands behind its layers."""
    head = cast(MedusaConfig, source.config)
    weights = {_written_name(name, head.mlp_layers): one for name, one in source.weights.items()}
    if not head.own_heads:
        weights[SHARED] = source.output_rows
    vocab = weights.pop("vocab", None)
    return weights if vocab is None or len(vocab) == source.config.vocab_size else weights | {IDS: vocab}


def _written_name(ours: str, layers: int) -> str:
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
        made[SHARED] = Spec((drafted, width))
    return made | ({IDS: Spec((drafted,), "int64")} if drafted < vocab else {})


def number_of(fields: Mapping[str, Any], what: str) -> int:
    """Of heads or layers, by any of the names that vLLM takes for it."""
    return next(value for name, value in fields.items() if "num" in name and what in name)


MEDUSA = Layout(
    "medusa",
    written_config,
    written_tensors,
    manifest,
    Reader(read_config, read_tensors, lambda folder: {"output head": _shared(folder)}),
    weights="medusa_lm_head.safetensors",
    most=lambda fields: number_of(fields, "heads"),
)
