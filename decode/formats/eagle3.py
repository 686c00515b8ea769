"""EAGLE-3 heads: native ones (SafeAILab, `midlayer.*`), those of SpecForge and AngelSlim, which are called the same,
and those of the speculators library (RedHatAI, `layers.0.*`). All have an output head of their own.

    fc.weight (d, n d)                     over the target's hidden states side by side, earliest layer first
    midlayer.self_attn.q_proj.weight ...   one layer over [embedding; state]
    midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight
    norm.weight, lm_head.weight (V_draft, d)
    d2t (V_draft,), t2d (V,)               of a reduced vocabulary
    embed_tokens.weight (V, d)             the target's, where it is there

What is written is one folder for vLLM (both runners), SGLang, TensorRT-LLM, llama.cpp and the speculators library.
config.json says everything twice, each half made from the same values: flat, as engines read a head of their own, and
as the speculators library nests it. Its top-level model_type makes vLLM read the flat half; `speculators_config` lets
`vllm serve FOLDER` find the target. Layers are called `layers.0`, since the library leaves the `midlayer` of older
folders random; SGLang knows that name from 0.5.12 on.

Which hidden states are read stands in two lists as well: at the top as vLLM, llama.cpp and speculators count them, in
`eagle_config` as SGLang does, which adds one (`decode.formats.states`). Engines hand states over in the order of their
layers, so `fc` has its columns in that order, low to high.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from decode.common.errors import InputError
from decode.drafters.eagle3 import Eagle3Config, usual_taps
from decode.drafters.head_config import HeadConfig
from decode.formats import base
from decode.formats.base import EMBEDDING, FUSED, OUTPUT, Get, Layout, Reader, Spec
from decode.formats.folder import PublishedFolder
from decode.formats.states import ascending, listed, lists, taps_of
from decode.formats.vocabulary import map_specs, picked, token_maps, vocabulary_of
from decode.models.describe import ModelDescription

if TYPE_CHECKING:
    from decode.formats.source import Source

AT_TOP, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"
"""Where the hidden states that it reads are listed."""
DEPTH = 4
"""Tokens that training unrolls of a head whose folder does not say how many it was trained with."""
_LAYER = re.compile(r"^(midlayer|layers\.0)\.")
_PARTS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn", "mlp")
"""Of the layer."""
_PASSED_OVER = re.compile(r"^(t2d|d2t)$|^embed_tokens\.weight$|rotary_emb\.inv_freq$|^verifier_(lm_head|norm)\.weight$")
"""Told by other tensors, or the target's own; speculators keeps those of its training target as `verifier_*`."""
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_INPUT_NORM, _STATE_NORM = "input_norm.weight", "fc_norm.{}.weight"
"""Of the states side by side, and of each."""


def read_config(folder: PublishedFolder, target: ModelDescription) -> HeadConfig:
    """Of one layer."""
    folder.only({"num_hidden_layers": 1}, "a second layer would be left out")
    return read_head(folder, target)


def read_head(folder: PublishedFolder, target: ModelDescription) -> Eagle3Config:
    """Flags that config.json leaves out are off, but norms whose weights are there."""
    folder.only({"hidden_act": "silu", "mlp_bias": False}, "its MLP would be another one")
    _check_width_of_target(folder)
    width, vocab = folder.needed("hidden_size", "vocab_size")
    base.check_sizes(folder, width, vocab, target)
    fields, names = folder.fields, _our_names(folder)
    nested = fields.get("eagle_config") or {}
    ids = vocabulary_of(folder, target.vocab_size)
    return Eagle3Config(
        **base.read_layer(folder, target),
        taps=taps_of(folder) or _assumed(folder, target.num_layers),
        depth=_trained_depth(folder),
        draft_vocab_size=None if ids is None else len(ids),
        fc_norm=_STATE_NORM.format(0) in names,
        norm_before_fc=_INPUT_NORM in names or bool(nested.get("norm_before_fc")),
        norm_output=bool(fields.get("norm_output")),
        norm_before_residual=bool(fields.get("norm_before_residual")),
        qk_norm="self_attn.q_norm.weight" in names,
        attention_bias="self_attn.q_proj.bias" in names,
        own_head=OUTPUT in names,
    )


def read_tensors(folder: PublishedFolder, config: HeadConfig, get: Get) -> dict[str, Tensor]:
    """Those of the layer without their prefix; rows of the output head in the order of ascending tokens."""
    held = {ours: get(theirs) for ours, theirs in _our_names(folder).items() if not _PASSED_OVER.search(ours)}
    ids = vocabulary_of(folder, config.vocab_size)
    if ids is None:
        return held
    order = ids.argsort()
    if OUTPUT in held and len(held[OUTPUT]) == len(order):
        held[OUTPUT] = picked(held[OUTPUT], order)
    return held | {"vocab": ids[order]}


def read_ends(folder: PublishedFolder) -> dict[str, str | None]:
    """The embedding that it ships."""
    return {"embedding": _our_names(folder).get(EMBEDDING)}


def _our_names(folder: PublishedFolder) -> dict[str, str]:
    return {_LAYER.sub("", plain): theirs for plain, theirs in folder.plain_names.items()}


def _assumed(folder: PublishedFolder, num_layers: int) -> tuple[int, ...]:
    taps = usual_taps(num_layers)
    if list(taps) != sorted(set(taps)):
        raise InputError(
            f"{folder.path}/config.json lists no hidden states, and the usual ones, (2, L // 2, L - 3), are "
            f"{list(taps)} of {num_layers} layers: not three ascending ones. Write those that it was trained on as "
            f"{AT_TOP}"
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


def written_config(source: Source) -> dict[str, Any]:
    """Both halves of config.json."""
    head = cast(Eagle3Config, source.config)
    kind, name = ("qwen3", "Eagle3Qwen3ForCausalLM") if head.qk_norm else ("llama", "LlamaForCausalLMEagle3")
    layer = {"model_type": kind, "num_hidden_layers": 1} | base.written_layer(source)
    layer["attention_bias"] = head.attention_bias
    return layer | {
        "architectures": [name],
        "draft_vocab_size": head.draft_vocab_size or head.vocab_size,
        "target_hidden_size": head.hidden_size,
        "num_aux_hidden_states": len(head.taps),
        **lists(head.taps, AT_TOP),
        **{name: getattr(head, name) for name in _FLAGS},
        "eagle_config": {
            "use_aux_hidden_state": True,
            **lists(head.taps, NESTED),
            "norm_before_fc": head.norm_before_fc,
        },
        "transformer_layer_config": layer,
        **base.speculators_fields(source, "eagle3"),
    }


def written_tensors(source: Source, own: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The head's own tensors (None: all of them), the target's rows but where it has its own, and the maps of a reduced
    vocabulary."""
    own = source.weights if own is None else own
    weights = {_written_name(name): one for name, one in own.items() if name != "vocab"}
    weights = _low_to_high(weights, source.config.taps)
    rows = {EMBEDDING: source.embedding, OUTPUT: source.output_rows}
    return rows | weights | token_maps(source.head.vocab, source.config.vocab_size)


def _written_name(ours: str) -> str:
    return f"layers.0.{ours}" if ours.startswith(_PARTS) else ours


def _low_to_high(weights: dict[str, Tensor], taps: tuple[int, ...]) -> dict[str, Tensor]:
    """What reads the target's states, in the order in which engines hand them over."""
    moved = {name: ascending(weights[name], taps) for name in (FUSED, _INPUT_NORM) if name in weights}
    if _STATE_NORM.format(0) in weights:
        order = sorted(range(len(taps)), key=taps.__getitem__)
        moved |= {_STATE_NORM.format(new): weights[_STATE_NORM.format(old)] for new, old in enumerate(order)}
    return weights | moved


def manifest(fields: Mapping[str, Any]) -> dict[str, Spec]:
    """The tensors of the layers, of which the first reads [embedding; state], of the ends and of the norms. Ours have
    one layer, as Llama's; others may have more, Qwen3's norms of queries and keys, and biases."""
    width, vocab = fields["hidden_size"], fields["vocab_size"]
    drafted, states = fields.get("draft_vocab_size") or vocab, num_states(fields)
    from_target = fields.get("target_hidden_size") or width
    specs: dict[str, Spec] = {}
    for index in range(fields["num_hidden_layers"]):
        read, mlp_bias = width if index else 2 * width, fields.get("mlp_bias")
        norms = {"norms": ("hidden_norm",), "qk_norm": _is_qwen3(fields), "mlp_bias": mlp_bias}
        specs |= base.layer_specs(fields, f"layers.{index}", read, **norms)
        if index:  # vLLM norms the state by the one, SGLang by the other
            both = ("input_layernorm.weight", "hidden_norm.weight")
            specs |= {f"layers.{index}.{name}": Spec((width,), optional=True) for name in both}
    specs |= {
        FUSED: Spec((width, states * from_target)),
        "norm.weight": Spec((width,)),
        OUTPUT: Spec((drafted, width)),
        EMBEDDING: Spec((vocab, width)),
    }
    if fields.get("fc_norm"):
        specs |= {_STATE_NORM.format(place): Spec((from_target,)) for place in range(states)}
    if fields.get("norm_before_fc"):
        specs[_INPUT_NORM] = Spec((states * from_target,))
    return specs | (map_specs(drafted, vocab) if drafted != vocab else {})


def _is_qwen3(fields: Mapping[str, Any]) -> bool:
    """Whether vLLM builds Qwen3's layer: by the architecture, and where the speculators library names its own, by the
    model_type of the layer (registry.py, configs/speculators/algos.py)."""
    names = fields.get("architectures") or []
    is_theirs = "speculators_model_type" in fields and "LlamaForCausalLMEagle3" not in names
    return "Eagle3Qwen3ForCausalLM" in names or (is_theirs and fields.get("model_type") == "qwen3")


def num_states(fields: Mapping[str, Any]) -> int:
    """Hidden states that a head reads, as engines find their number where it is not written."""
    found = listed(fields)
    return fields.get("num_aux_hidden_states") or len(found.get(NESTED) or found.get(AT_TOP) or (2, 1, 3))


EAGLE3 = Layout(
    "eagle3",
    written_config,
    written_tensors,
    manifest,
    Reader(read_config, read_tensors, read_ends),
)
