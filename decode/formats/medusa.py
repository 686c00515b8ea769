"""Medusa heads: those of their authors (FasterDecoding, `medusa_lm_head.pt`), of TGI (`medusa_lm_head.safetensors`),
and by vLLM's own names.

    0.0.linear.weight (d, d), .bias (d,)   residual layer 0 of head 0; also blocks.0.layers.0.weight
    0.1.weight (V, d)                      its output head, behind its layers; also lm_heads.0.weight
    lm_head.weight (V_draft, d)            one for all heads, the target's (`original_lm_head`)
    token_map (V_draft,)                   of a reduced vocabulary

The authors' config.json says neither width nor vocabulary, and some say fewer heads than the file holds
(medusa-vicuna-7b-v1.3: 2 of 5), so that all of this is counted in the file.
"""

from __future__ import annotations

import re

from torch import Tensor

from decode.common.errors import InputError
from decode.drafters.head_draft import HeadConfig
from decode.drafters.medusa import MedusaConfig
from decode.formats.folder import PublishedFolder
from decode.formats.reader import Get, Reader, check_sizes, only
from decode.formats.vocabulary import IDS, picked, vocabulary_of
from decode.models.hidden_states import FINAL
from decode.models.load import ModelDescription

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


def config(folder: PublishedFolder, target: ModelDescription) -> HeadConfig:
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
    only(folder, {"medusa_num_layers": layers, "logit_scale": 1.0}, "it would be read with layers or scores missing")
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


def tensors(folder: PublishedFolder, config: HeadConfig, get: Get) -> dict[str, Tensor]:
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
    heads = [theirs for ours, theirs in _names(folder).items() if _OUTPUT.match(ours) or ours == "lm_head.weight"]
    return next((folder.stored[name].shape[0] for name in heads), None)


def _shared(folder: PublishedFolder) -> str | None:
    """The one output head of all heads, which is the target's."""
    names = _names(folder)
    if "lm_head.weight" in names:
        return names["lm_head.weight"]
    return names.get("lm_heads.0.weight") if folder.written.get("original_lm_head") else None


MEDUSA = Reader("medusa", config, tensors, lambda folder, config: None, lambda folder, config: _shared(folder))
