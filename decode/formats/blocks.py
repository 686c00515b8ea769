"""DFlash (z-lab) and DSpark (deepseek-ai) heads: a few Qwen3 layers over a block of tokens, which also see the target's
hidden states.

    fc.weight (d, n d), hidden_norm.weight, norm.weight, layers.0.self_attn.q_proj.weight ...
    markov_head.markov_w1.weight (V, r), .markov_w2.weight (V_draft, r)   DSpark: bias by the token before
    confidence_head.proj.weight (1, d + r), .bias                         DSpark: chance of acceptance
    embed_tokens.weight, lm_head.weight, d2t                              the target's, where they are there

The mask is a row of the embedding, `mask_token_id`: the target's, or one behind it (V + 1 rows, ours); or a vector in
`mask_embedding.pt` (vLLM 0.32, qwen3_dflash.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.nn.functional import pad

from decode.common.errors import InputError
from decode.drafters.dspark import DSparkConfig
from decode.drafters.head_draft import HeadConfig
from decode.formats.folder import PublishedFolder
from decode.formats.reader import Get, Reader, check_sizes, layer_fields, needed, only
from decode.formats.states import taps_of
from decode.formats.vocabulary import vocabulary_of
from decode.formats.weights import read_pickle
from decode.models.load import ModelDescription

MASK_FILE = "mask_embedding.pt"
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
KNOWN, BIAS = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CHANCE = "confidence_head.proj."
_TOLD = {"d2t", "t2d", EMBEDDING, OUTPUT, KNOWN, BIAS, f"{CHANCE}weight", f"{CHANCE}bias"}
_OWN = ("verifier_lm_head.", "verifier_norm.")


def dflash_config(folder: PublishedFolder, target: ModelDescription) -> HeadConfig:
    """Slot 0 holds the token before the block and drafts nothing, unless `sample_from_anchor`."""
    is_anchor = bool(_setting(folder, "sample_from_anchor"))
    slots = needed(folder, "block_size")["block_size"]
    depth = slots if is_anchor else slots - 1
    return _config(folder, target, depth, is_anchor, markov_rank=0, confidence=False)


def dspark_config(folder: PublishedFolder, target: ModelDescription) -> HeadConfig:
    """`block_size` is what is drafted, and in the speculators library the slots of a block; left out,
    `sample_from_anchor` is true, there false (vLLM 0.32, configs/speculators/algos.py)."""
    only(folder, {"markov_head_type": "vanilla"}, "its bias is made by gates or a recurrent state")
    anchor = _setting(folder, "sample_from_anchor")
    is_anchor = not folder.is_speculators if anchor is None else anchor
    size = needed(folder, "block_size")["block_size"]
    depth = size - (folder.is_speculators and not is_anchor)
    rank = folder.stored[_theirs(folder, KNOWN)].shape[-1]
    if rank == 1 and not folder.tensor(_theirs(folder, BIAS)).any():
        rank = 0  # engines have no DSpark without a bias, so that one of zeros is written
    has_chance = f"{CHANCE}weight" in _plain(folder)
    return _config(folder, target, depth, is_anchor, markov_rank=rank, confidence=has_chance)


def _config(folder: PublishedFolder, target: ModelDescription, depth: int, is_anchor: bool, **own: Any) -> HeadConfig:
    only(folder, {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False, "is_causal": False},
         "blocks are computed here whole, by Qwen3's layers")  # fmt: skip
    if any((folder.fields.get("dflash_config") or {}).get(name) for name in ("causal", "use_swa")):
        raise InputError(
            f"{folder.path}/config.json sets causal or use_swa in dflash_config, and the slots of a block all see each "
            "other here. Serve this head with the engine that it was published for"
        )
    taps = taps_of(folder)
    if taps is None:
        raise InputError(
            f"{folder.path}/config.json lists no target_layer_ids, so nobody knows which hidden states it reads; write "
            "those that it was trained on"
        )
    check_sizes(folder, needed(folder, "hidden_size")["hidden_size"], _num_tokens(folder, target), target)
    ids = vocabulary_of(folder, target.vocab_size)
    return DSparkConfig(
        **layer_fields(folder, target),
        taps=taps,
        depth=max(depth, 1),
        draft_vocab_size=None if ids is None else len(ids),
        layers=needed(folder, "num_hidden_layers")["num_hidden_layers"],
        anchors=1,
        layout="anchor" if is_anchor else "fill_in",
        mask_token=None if _has_vector(folder, target) else _mask_row(folder, target),
        **own,
    )


def tensors(folder: PublishedFolder, config: HeadConfig, get: Get) -> dict[str, Tensor]:
    """The layers as they are called here too, with the mask and both heads of DSpark under our names."""
    shape, names = cast(DSparkConfig, config), _plain(folder)
    held = {ours: get(theirs) for ours, theirs in names.items() if ours not in _TOLD and not ours.startswith(_OWN)}
    if shape.mask_token is None:
        held["mask.weight"] = _mask(folder, get)
    ids = vocabulary_of(folder, config.vocab_size)
    if ids is not None:
        if not bool((ids.diff() > 0).all()):
            raise InputError(f"d2t of {folder.path} gives tokens that do not ascend; fetch the folder again")
        held["vocab"] = ids
    if shape.markov_rank:
        held["markov_in.weight"] = get(_theirs(folder, KNOWN))[: config.vocab_size]
        held["markov_out.weight"] = get(_theirs(folder, BIAS))
    return held | (_chance(shape, names, get) if shape.confidence else {})


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


def _mask(folder: PublishedFolder, get: Get) -> Tensor:
    """(1, d) the vector of the file, else the last row of the embedding."""
    if (folder.path / MASK_FILE).is_file():
        return _vector(folder.path / MASK_FILE).reshape(1, -1)
    return get(_theirs(folder, EMBEDDING))[-1:]


def _vector(file: Path) -> Tensor:
    """(d,) of a file that holds the vector, or {"embedding": vector, "mask_token_id": its id}."""
    held = read_pickle(file)
    vector = held.get("embedding") if isinstance(held, dict) else held
    if not isinstance(vector, Tensor) or not vector.is_floating_point():
        raise InputError(f"{file} holds no vector, and blocks are filled with it. Fetch it again")
    return vector


def _has_vector(folder: PublishedFolder, target: ModelDescription) -> bool:
    if (folder.path / MASK_FILE).is_file():
        return True
    name = _plain(folder).get(EMBEDDING)
    rows = 0 if name is None else folder.stored[name].shape[0]
    return _mask_token(folder) == target.vocab_size < rows


def _mask_row(folder: PublishedFolder, target: ModelDescription) -> int:
    """A token of the target, whose row of the embedding is the mask."""
    token = _mask_token(folder)
    if not 0 <= token < target.vocab_size:
        raise InputError(
            f"{folder.path}/config.json says mask_token_id={token}, and the target has tokens 0 to "
            f"{target.vocab_size - 1}; neither its embedding nor the folder's has such a row, so blocks cannot be "
            "filled. Write the id that it was trained with, or fetch the folder again"
        )
    return token


def _mask_token(folder: PublishedFolder) -> int:
    token = _setting(folder, "mask_token_id")
    if token is None:
        raise InputError(
            f"{folder.path}/config.json says no mask_token_id, and there is no {MASK_FILE}: nobody knows what stands "
            "in a block for the tokens to be drafted. Write the id that it was trained with"
        )
    return token


def _num_tokens(folder: PublishedFolder, target: ModelDescription) -> int:
    """Of the target; the last row may be the mask's."""
    told = needed(folder, "vocab_size")["vocab_size"]
    is_mask_row = told == target.vocab_size + 1 and _setting(folder, "mask_token_id") == target.vocab_size
    return target.vocab_size if is_mask_row else told


def _setting(folder: PublishedFolder, name: str) -> Any:
    """At the top of config.json or in a part of it, wherever it is set."""
    parts = (folder.fields, *(folder.fields.get(part) or {} for part in ("dflash_config", "dspark_config")))
    return next((part[name] for part in parts if part.get(name) is not None), None)


def _plain(folder: PublishedFolder) -> dict[str, str]:
    return {name.removeprefix("model."): name for name in folder.stored}


def _theirs(folder: PublishedFolder, name: str) -> str:
    names = _plain(folder)
    if name not in names:
        raise InputError(f"{folder.path} holds no {name}, which config.json calls for. Fetch the folder again")
    return names[name]


def _embedding(folder: PublishedFolder, config: HeadConfig) -> str | None:
    return _plain(folder).get(EMBEDDING)


def _output_head(folder: PublishedFolder, config: HeadConfig) -> str | None:
    return _plain(folder).get(OUTPUT)


DFLASH = Reader("dflash", dflash_config, tensors, _embedding, _output_head)
DSPARK = Reader("dspark", dspark_config, tensors, _embedding, _output_head)
