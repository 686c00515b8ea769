"""DFlash (z-lab), and what DSpark (deepseek-ai) shares with it: a few Qwen3 layers over a block of tokens, which also
see the target's hidden states.

    fc.weight (d, n d)                            over the states of one token, those of the earliest layer first
    hidden_norm.weight, norm.weight, layers.0.self_attn.q_proj.weight ...
    embed_tokens.weight, lm_head.weight, d2t      the target's, where they are there

DFlash is written without both ends, which engines take from the target. Its block holds the token before it in slot 0
and masks behind it; slot k drafts the k-th token, slot 0 none. So a block of `block_size` 4 drafts 3 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from decode.common.errors import InputError
from decode.drafters.dspark import DSparkConfig
from decode.drafters.head_config import HeadConfig
from decode.formats import base
from decode.formats.base import EMBEDDING, FUSED, OUTPUT, Get, Layout, Reader, Spec
from decode.formats.folder import PublishedFolder
from decode.formats.mask import HOW, MASK_ID, mask_id, mask_row, mask_vector, write_mask
from decode.formats.states import ascending, listed, lists, taps_of
from decode.formats.vocabulary import MARKS, OFFSETS, map_specs, token_maps, vocabulary_of
from decode.models.describe import ModelDescription

if TYPE_CHECKING:
    from decode.formats.source import Source

AT_TOP, NESTED = "target_layer_ids", "dflash_config.target_layer_ids"
SPECULATORS = "aux_hidden_state_layer_ids"
"""Where the hidden states that it reads are listed."""
_OWN = ("layers.", "norm.", "hidden_norm.", FUSED)
"""Called the same here and there."""
KNOWN, BIAS = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CHANCE = "confidence_head.proj."
"""DSpark's."""
_TOLD = (OFFSETS, MARKS, EMBEDDING, OUTPUT, KNOWN, BIAS, f"{CHANCE}weight", f"{CHANCE}bias")
_TARGETS = ("verifier_lm_head.", "verifier_norm.")


def read_dflash(folder: PublishedFolder, target: ModelDescription) -> HeadConfig:
    """Slot 0 holds the token before the block and drafts nothing, unless `sample_from_anchor`."""
    is_anchor = bool(folder.setting("sample_from_anchor"))
    (slots,) = folder.needed("block_size")
    depth = slots if is_anchor else slots - 1
    return read_blocks(folder, target, depth, is_anchor, markov_rank=0, confidence=False)


def read_blocks(
    folder: PublishedFolder, target: ModelDescription, depth: int, is_anchor: bool, **own: Any
) -> HeadConfig:
    """Of blocks that draft so many tokens; `own` is DSpark's."""
    folder.only(
        {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False},
        "blocks are computed here by Qwen3's layers",
    )
    nested = folder.fields.get("dflash_config") or {}
    if {*(folder.fields.get("layer_types") or ())} - {"full_attention"} or nested.get("swa_window_size"):
        raise InputError(
            f"{folder.path}/config.json gives layers a window (layer_types, swa_window_size), and blocks see the whole "
            "text here. Serve this head with the engine it was made for"
        )
    causal = {folder.fields.get("is_causal"), nested.get("causal")} - {None}
    if nested.get("use_swa") or len(causal) > 1:
        raise InputError(
            f"{folder.path}/config.json sets use_swa in dflash_config, or is_causal beside another causal there, and "
            "slots see all of their block here, or all before them. Serve this head with the engine it was made for"
        )
    taps = taps_of(folder)
    if taps is None:
        raise InputError(
            f"{folder.path}/config.json lists no {AT_TOP}, so nobody knows which hidden states it reads; write "
            "those that it was trained on"
        )
    width, told = folder.needed("hidden_size", "vocab_size")
    is_mask_row = told == target.vocab_size + 1 and folder.setting(MASK_ID) == target.vocab_size
    base.check_sizes(folder, width, target.vocab_size if is_mask_row else told, target)
    ids = vocabulary_of(folder, target.vocab_size)
    return DSparkConfig(
        **base.read_layer(folder, target),
        taps=taps,
        depth=max(depth, 1),
        draft_vocab_size=None if ids is None else len(ids),
        layers=folder.needed("num_hidden_layers")[0],
        anchors=1,
        layout="anchor" if is_anchor else "fill_in",
        mask_token=mask_row(folder, target),
        causal=causal == {True},
        **own,
    )


def read_tensors(folder: PublishedFolder, config: HeadConfig, get: Get) -> dict[str, Tensor]:
    """The layers as they are called here too, with the mask and the draft vocabulary."""
    names = [name for name in folder.plain_names if name not in _TOLD and not name.startswith(_TARGETS)]
    held = {name: get(folder.named(name)) for name in names}
    if cast(DSparkConfig, config).mask_token is None:
        held["mask.weight"] = mask_vector(folder, get)
    ids = vocabulary_of(folder, config.vocab_size)
    if ids is not None:
        if not bool((ids.diff() > 0).all()):
            raise InputError(f"{OFFSETS} of {folder.path} gives tokens that do not ascend; fetch the folder again")
        held["vocab"] = ids
    return held


def read_ends(folder: PublishedFolder) -> dict[str, str | None]:
    """Where they are there, they are the target's."""
    return {"embedding": folder.plain_names.get(EMBEDDING), "output head": folder.plain_names.get(OUTPUT)}


def written_dflash(source: Source) -> dict[str, Any]:
    """With what engines guess where it is missing: that blocks see themselves whole, and that slot 0 drafts nothing."""
    fields = written_blocks(source, "dflash", mask_id(source), source.block.depth + 1)
    return {"architectures": ["DFlashDraftModel"]} | fields


def written_blocks(source: Source, kind: str, mask_token_id: int | None, block_size: int) -> dict[str, Any]:
    """config.json: flat, as engines read a head of their own, and where the speculators library knows such a head, as
    the library nests it."""
    config, taps = source.block, source.taps
    layers = base.written_layer(source) | {
        "model_type": "qwen3",
        "num_hidden_layers": config.layers,
        "layer_types": ["full_attention"] * config.layers,
        "use_sliding_window": False,
        "sliding_window": None,
    }
    own = {
        "block_size": block_size,
        MASK_ID: mask_token_id,
        "sample_from_anchor": config.layout == "anchor",
        "is_causal": config.causal,
        "target_hidden_size": config.hidden_size,
        "num_target_layers": source.target.num_layers,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "use_aux_hidden_state": True,
        "num_aux_hidden_states": len(taps),
        **lists(taps, "eagle_aux_hidden_state_layer_ids", AT_TOP),
    }
    nested = (MASK_ID, AT_TOP, "sample_from_anchor", "use_aux_hidden_state", "block_size")
    own["dflash_config"] = {name: own[name] for name in nested} | {"causal": config.causal, "use_swa": False}
    if no_speculators(source) is None:
        # left out, the library takes layers for causal, and vLLM for not
        own |= {**lists(taps, SPECULATORS), "sliding_window_non_causal": True}
        own |= {"transformer_layer_config": layers, **base.speculators_fields(source, kind)}
    return layers | own


def no_speculators(source: Source) -> str | None:
    """Why the speculators library cannot read it; None where it can."""
    config = source.block
    if config.causal:
        return (
            "the speculators library has causal blocks in layers with a window alone; train with "
            "draft.head.causal=false"
        )
    if source.form in ("dflash2", "lilicorr"):
        return f"{source.form} heads are written for vLLM's own reader alone; use format=vllm"
    if config.mask_token is None:
        return f"its mask is a learned vector, and the speculators library has the target's embedding alone; {HOW}"
    if config.markov_rank and config.layout == "fill_in":
        return (
            "the speculators library counts in block_size the slots of a DSpark block, others the tokens that it "
            "drafts; train with draft.head.layout=anchor, where they are as many"
        )
    return None


def written_tensors(source: Source) -> dict[str, Tensor]:
    """The layers and what is around them; with a reduced vocabulary its rows of the output head and its ids."""
    own = {name: one for name, one in source.weights.items() if name.startswith(_OWN)}
    own[FUSED] = ascending(own[FUSED], source.taps)
    maps = token_maps(source.head.vocab, source.config.vocab_size)
    return own | (maps | {OUTPUT: source.output_rows} if maps else {})


def manifest(written: Mapping[str, Any]) -> dict[str, Spec]:
    """Names and shapes of those tensors, by a config.json."""
    width, specs = written["hidden_size"], {}
    for index in range(written["num_hidden_layers"]):
        specs |= base.layer_specs(written, f"layers.{index}", width, qk_norm=True)
    read = num_states(written) * (written.get("target_hidden_size") or width)
    specs |= {name: Spec((width,)) for name in ("hidden_norm.weight", "norm.weight")}
    return specs | {FUSED: Spec((width, read))} | _vocabulary(written)


def num_states(written: Mapping[str, Any]) -> int:
    """Hidden states that `fc` reads, wherever they are listed."""
    found = listed(written)
    return len(found.get(NESTED) or found.get(AT_TOP) or written[SPECULATORS])


def _vocabulary(written: Mapping[str, Any]) -> dict[str, Spec]:
    width, vocab = written["hidden_size"], written["vocab_size"]
    drafted = written.get("draft_vocab_size") or vocab
    tokens = num_tokens(written)
    is_reduced = drafted < tokens
    specs = {
        EMBEDDING: Spec((vocab, width), optional=vocab == tokens),
        OUTPUT: Spec((drafted, width), optional=not is_reduced),
    }
    return specs | (map_specs(drafted, tokens) if is_reduced else {})


def num_tokens(written: Mapping[str, Any]) -> int:
    """Of the target. The last row of vocab_size may be one that the target does not have, for a learned mask
    (dspark.py); elsewhere it is taken for one where all others are drafted."""
    vocab, drafted = written["vocab_size"], written.get("draft_vocab_size")
    has_mask_row = drafted is not None and drafted == written.get(MASK_ID) == vocab - 1
    return written.get("target_vocab_size") or vocab - has_mask_row


DFLASH = Layout(
    "dflash",
    written_dflash,
    written_tensors,
    manifest,
    Reader(read_dflash, read_tensors, read_ends),
    extras=write_mask,
    most=lambda fields: fields["block_size"] - 1,
)
