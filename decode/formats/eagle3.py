"""EAGLE-3 heads: native ones (SafeAILab, `midlayer.*`), those of SpecForge and AngelSlim, which are called the same,
and those of the speculators library (RedHatAI, `layers.0.*`). All have an output head of their own.

    fc.weight (d, n d)                     over the target's hidden states side by side, earliest layer first
    midlayer.self_attn.q_proj.weight ...   one layer over [embedding; state]
    midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight
    norm.weight, lm_head.weight (V_draft, d)
    d2t (V_draft,), t2d (V,)               of a reduced vocabulary
    embed_tokens.weight (V, d)             the target's, where it is there
"""

from __future__ import annotations

import re

from torch import Tensor

from decode.common.errors import InputError
from decode.drafters.eagle3 import Eagle3Config
from decode.drafters.head_draft import HeadConfig
from decode.formats.folder import PublishedFolder
from decode.formats.reader import DEPTH, Get, Reader, check_sizes, layer_fields, needed, only
from decode.formats.states import taps_of
from decode.formats.vocabulary import picked, vocabulary_of
from decode.models.load import ModelDescription

_LAYER = re.compile(r"^(midlayer|layers\.0)\.")
_PASSED_OVER = re.compile(r"^(t2d|d2t)$|^embed_tokens\.weight$|rotary_emb\.inv_freq$|^verifier_(lm_head|norm)\.weight$")
"""Told by other tensors, or the target's own; speculators keeps those of its training target as `verifier_*`."""


def config(folder: PublishedFolder, target: ModelDescription) -> HeadConfig:
    """Flags that config.json leaves out are off, but norms whose weights are there."""
    only(folder, {"num_hidden_layers": 1}, "a second layer would be left out")
    only(folder, {"hidden_act": "silu", "mlp_bias": False}, "its MLP would be another one")
    _check_width_of_target(folder)
    sizes = needed(folder, "hidden_size", "vocab_size")
    check_sizes(folder, sizes["hidden_size"], sizes["vocab_size"], target)
    fields, names = folder.fields, {plain_name(name) for name in folder.stored}
    nested = fields.get("eagle_config") or {}
    ids = vocabulary_of(folder, target.vocab_size)
    return Eagle3Config(
        **layer_fields(folder, target),
        taps=taps_of(folder) or _assumed(folder, target.num_layers),
        depth=_trained_depth(folder),
        draft_vocab_size=None if ids is None else len(ids),
        fc_norm="fc_norm.0.weight" in names,
        norm_before_fc="input_norm.weight" in names or bool(nested.get("norm_before_fc")),
        norm_output=bool(fields.get("norm_output")),
        norm_before_residual=bool(fields.get("norm_before_residual")),
        qk_norm="self_attn.q_norm.weight" in names,
        attention_bias="self_attn.q_proj.bias" in names,
        own_head="lm_head.weight" in names,
    )


def tensors(folder: PublishedFolder, config: HeadConfig, get: Get) -> dict[str, Tensor]:
    """Those of the layer without their prefix; rows of the output head in the order of ascending tokens."""
    names = {plain_name(name): name for name in folder.stored}
    held = {ours: get(theirs) for ours, theirs in names.items() if not _PASSED_OVER.search(ours)}
    ids = vocabulary_of(folder, config.vocab_size)
    if ids is None:
        return held
    order = ids.argsort()
    if "lm_head.weight" in held and len(held["lm_head.weight"]) == len(order):
        held["lm_head.weight"] = picked(held["lm_head.weight"], order)
    return held | {"vocab": ids[order]}


def plain_name(theirs: str) -> str:
    """Ours, of a tensor that is the head's own."""
    return _LAYER.sub("", theirs.removeprefix("model."))


def _assumed(folder: PublishedFolder, num_layers: int) -> tuple[int, ...]:
    """What native heads are trained on and do not write down: hidden states 2, L // 2 and L - 3 (SafeAILab/EAGLE,
    modeling_llama_kv.py; vLLM 0.32, model_executor/models/llama.py)."""
    taps = (2, num_layers // 2, num_layers - 3)
    if list(taps) != sorted(set(taps)):
        raise InputError(
            f"{folder.path}/config.json lists no hidden states, and those that are then meant, (2, L // 2, L - 3), are "
            f"{list(taps)} of a target with {num_layers} layers: not three ascending ones. Write those that it was "
            "trained on as eagle_aux_hidden_state_layer_ids"
        )
    return taps


def _trained_depth(folder: PublishedFolder) -> int:
    methods = (folder.written.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens") or folder.fields.get("ttt_length") or DEPTH


def _check_width_of_target(folder: PublishedFolder) -> None:
    width, theirs = folder.fields.get("hidden_size"), folder.fields.get("target_hidden_size")
    if theirs is not None and theirs != width:
        raise InputError(
            f"{folder.path}/config.json says hidden_size={width} and target_hidden_size={theirs}, and heads are as "
            "wide as their target here. Serve this head with the engine that it was published for"
        )


def _embedding(folder: PublishedFolder, config: HeadConfig) -> str | None:
    return next((name for name in folder.stored if plain_name(name) == "embed_tokens.weight"), None)


EAGLE3 = Reader("eagle3", config, tensors, _embedding, lambda folder, config: None)
