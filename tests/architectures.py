"""Tiny random targets of many architectures, in fp64: experts, position tables, windows, soft caps, parallel layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from decode.models.compatibility import attention_of

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
_BASE: dict[str, Any] = SIZES | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_OLD: dict[str, Any] = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MLA: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_TOWER: dict[str, Any] = {  # for pictures, which no text asks
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

CONFIGS: Mapping[str, dict[str, Any]] = {
    "mixtral": _BASE | _LOCAL_EXPERTS | {"head_dim": 8},
    "qwen3_moe": _BASE | _EXPERTS | {"moe_intermediate_size": 16, "head_dim": 8},
    "jetmoe": _BASE | {"num_local_experts": 3, "num_experts_per_tok": 2, "kv_channels": 8},
    "olmoe": _BASE | _EXPERTS,
    "gpt_oss": _BASE | _LOCAL_EXPERTS | {"head_dim": 8, "sliding_window": 4},
    "deepseek_v2": _BASE | _MLA,
    "deepseek_v3": _BASE | _MLA,
    "glm4_moe": _BASE
    | {key: _MLA[key] for key in _MLA if "rank" not in key and "head_dim" not in key}
    | {"head_dim": 8},
    "gptj": _OLD | {"rotary_dim": 4},
    "falcon": _BASE | {"alibi": False},
    "opt": _BASE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3},
    "phi3": _BASE,
    "gemma2": _BASE | {"head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 8},
    "olmo": _BASE,
    "cohere": _BASE,
    "dbrx": {
        "vocab_size": 64,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "xglm": {"vocab_size": 64, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "init_std": 0.3},
    "doge": _BASE,
    "codegen": _OLD | {"rotary_dim": 4},
    "qwen2": _BASE,
    "granite": _BASE | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "smollm3": _BASE,
    "olmo2": _BASE,
    "llama4_text": _BASE
    | _LOCAL_EXPERTS
    | {"head_dim": 8, "intermediate_size_mlp": 48, "layer_types": ["full_attention"] * 2}
    | {"attn_temperature_tuning": False},
    "gemma3": {
        "text_config": _BASE | {"head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 8},
        "vision_config": _TOWER,
        "mm_tokens_per_image": 4,
    },
}
"""Those that are decoded for."""

REFUSED: Mapping[str, dict[str, Any]] = {
    "mpt": {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "minimax": _BASE | _LOCAL_EXPERTS,
    "openai-gpt": _OLD,
    "xlnet": {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    "bert": _BASE,
}


def random_config(name: str) -> PretrainedConfig:
    """Of a target of this architecture, drawn wide, so that its distributions are far from uniform."""
    return AutoConfig.for_model(name, **{**CONFIGS, **REFUSED}[name])


def random_model(name: str) -> PreTrainedModel:
    """The target. Experts on the host, because the grouped product knows no fp64; XGLM's mask knows none either."""
    torch.manual_seed(0)
    config = random_config(name)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config))
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.to(torch.float32 if name == "xglm" else torch.float64).eval().requires_grad_(False)
