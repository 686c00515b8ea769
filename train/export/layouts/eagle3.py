"""An EAGLE-3 head in one folder for vLLM (both runners), SGLang, TensorRT-LLM, llama.cpp and the speculators library.

config.json says everything twice, each half made from the same values: flat, as engines read a head of their own, and
as the speculators library nests it. Its top-level model_type makes vLLM read the flat half; `speculators_config` lets
`vllm serve FOLDER` find the target. Layers are called `layers.0`, since the library leaves the `midlayer` of older
folders random; SGLang knows that name from 0.5.12 on.

Which hidden states are read stands in two lists as well: at the top, indices of transformers' `hidden_states`, which
are draftsmith's taps (vLLM, llama.cpp, speculators); in `eagle_config`, the layers that those come out of, one less
(SGLang, which adds one). Engines hand states over in the order of their layers, so `fc` has its columns in that order,
low to high. Queries, keys and values are made from [embedding; state].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from decode.drafters.eagle3 import Eagle3Config
from train.export.layouts.base import Layout, Spec, ascending, decoder_fields, speculators_fields, token_maps
from train.export.source import Source

_OF_THE_LAYER = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn", "mlp")


def config(source: Source) -> dict[str, Any]:
    """Both halves of config.json."""
    head = cast(Eagle3Config, source.config)
    kind, name = ("qwen3", "Eagle3Qwen3ForCausalLM") if head.qk_norm else ("llama", "LlamaForCausalLMEagle3")
    taps, layer = sorted(head.taps), {"model_type": kind, "num_hidden_layers": 1} | decoder_fields(source)
    layer["attention_bias"] = head.attention_bias
    return layer | {
        "architectures": [name],
        "draft_vocab_size": head.draft_vocab_size or head.vocab_size,
        "target_hidden_size": head.hidden_size,
        "num_aux_hidden_states": len(taps),
        "eagle_aux_hidden_state_layer_ids": taps,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
        "norm_output": head.norm_output,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
            "norm_before_fc": head.norm_before_fc,
        },
        "transformer_layer_config": layer,
        **speculators_fields(source, "eagle3"),
    }


def tensors(source: Source) -> dict[str, Tensor]:
    """The head's own tensors, the target's rows but where it has its own, and the maps of a reduced vocabulary."""
    weights = {_name(name): one for name, one in source.weights.items() if name != "vocab"}
    weights = _low_to_high(weights, source.config.taps)
    rows = {"embed_tokens.weight": source.embedding, "lm_head.weight": source.output_rows}
    return rows | weights | token_maps(source)


def _name(ours: str) -> str:
    return f"layers.0.{ours}" if ours.startswith(_OF_THE_LAYER) else ours


def _low_to_high(weights: dict[str, Tensor], taps: tuple[int, ...]) -> dict[str, Tensor]:
    """What reads the target's states, in the order in which engines hand them over."""
    moved = {name: ascending(weights[name], taps) for name in ("fc.weight", "input_norm.weight") if name in weights}
    if "fc_norm.0.weight" in weights:
        order = sorted(range(len(taps)), key=taps.__getitem__)
        moved |= {f"fc_norm.{new}.weight": weights[f"fc_norm.{old}.weight"] for new, old in enumerate(order)}
    return weights | moved


def manifest(fields: Mapping[str, Any]) -> dict[str, Spec]:
    """The tensors of the layers, of which the first reads [embedding; state], of the ends and of the norms. Ours have
    one layer, as Llama's; others may have more, Qwen3's norms of queries and keys, and biases."""
    width, vocab = fields["hidden_size"], fields["vocab_size"]
    drafted, states = fields.get("draft_vocab_size") or vocab, num_states(fields)
    from_target = fields.get("target_hidden_size") or width
    specs: dict[str, Spec] = {}
    for index in range(fields["num_hidden_layers"]):
        layer = _layer(fields, width if index else 2 * width)
        specs |= {f"layers.{index}.{name}": Spec(shape) for name, shape in layer.items()}
        if index:  # vLLM norms the state by the one, SGLang by the other
            both = ("input_layernorm.weight", "hidden_norm.weight")
            specs |= {f"layers.{index}.{name}": Spec((width,), optional=True) for name in both}
    specs |= {
        "fc.weight": Spec((width, states * from_target)),
        "norm.weight": Spec((width,)),
        "lm_head.weight": Spec((drafted, width)),
        "embed_tokens.weight": Spec((vocab, width)),
    }
    if fields.get("fc_norm"):
        specs |= {f"fc_norm.{place}.weight": Spec((from_target,)) for place in range(states)}
    if fields.get("norm_before_fc"):
        specs["input_norm.weight"] = Spec((states * from_target,))
    if drafted != vocab:
        specs |= {"d2t": Spec((drafted,), "int64"), "t2d": Spec((vocab,), "bool", optional=True)}
    return specs


def _layer(fields: Mapping[str, Any], read: int) -> dict[str, tuple[int, ...]]:
    """Names in a layer whose attention reads that many numbers."""
    width, inner = fields["hidden_size"], fields["intermediate_size"]
    queries, keys = (fields["head_dim"] * fields[name] for name in ("num_attention_heads", "num_key_value_heads"))
    attention = {"q_proj": (queries, read), "k_proj": (keys, read), "v_proj": (keys, read), "o_proj": (width, queries)}
    mlp = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    norms = dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), (width,))
    if _is_qwen3(fields):
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (fields["head_dim"],))
    matrices = {f"self_attn.{name}": shape for name, shape in attention.items()}
    matrices |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    biased = ["self_attn."] * bool(fields.get("attention_bias")) + ["mlp."] * bool(fields.get("mlp_bias"))
    biases = {f"{name}.bias": shape[:1] for name, shape in matrices.items() if name.startswith(tuple(biased))}
    return {f"{name}.weight": shape for name, shape in (norms | matrices).items()} | biases


def _is_qwen3(fields: Mapping[str, Any]) -> bool:
    """Whether vLLM builds Qwen3's layer: by the architecture, and where the speculators library names its own, by the
    model_type of the layer (registry.py, configs/speculators/algos.py)."""
    names = fields.get("architectures") or []
    is_theirs = "speculators_model_type" in fields and "LlamaForCausalLMEagle3" not in names
    return "Eagle3Qwen3ForCausalLM" in names or (is_theirs and fields.get("model_type") == "qwen3")


def num_states(fields: Mapping[str, Any]) -> int:
    """Hidden states that a head reads, as engines find their number where it is not written."""
    nested = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    listed = nested or fields.get("eagle_aux_hidden_state_layer_ids")
    return fields.get("num_aux_hidden_states") or len(listed or (2, 1, 3))


EAGLE3 = Layout("eagle3", config, tensors, manifest)
