"""TensorRT-LLM, the PyTorch backend (tensorrt_llm/_torch/models, each at the commit named). Modules look for their own
weights, so that names of no module are skipped; a module without one stops the engine, but in DFlash."""

from __future__ import annotations

from tests.train.export.loaders.base import Fields, Loader, fused, fusing, is_reduced, language_model

_NORMS = ("input_layernorm", "post_attention_layernorm")
_LINEAR = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj self_attn.q_norm self_attn.k_norm "
    "mlp.gate_proj mlp.up_proj mlp.down_proj input_layernorm post_attention_layernorm"
).split()
_SHARED = {r"(embed_tokens|lm_head)\.weight": None}


def _eagle3_room(fields: Fields) -> set[str]:
    room = fused("model.midlayer.", (*_NORMS, "hidden_norm")) | {"model.fc.weight", "model.norm.weight"}
    if fields["eagle_config"].get("norm_before_fc"):
        room |= {"model.input_norm.weight"}
    if fields.get("fc_norm"):
        room |= {f"model.fc_norm.{place}.weight" for place in range(fields["num_aux_hidden_states"])}
    return room | ({"model.d2t"} if is_reduced(fields) else set())


def _dflash_room(fields: Fields) -> set[str]:
    norms = (*_NORMS, "self_attn.q_norm", "self_attn.k_norm")
    layers = (fused(f"model.layers.{index}.", norms) for index in range(fields["num_hidden_layers"]))
    return set().union(*layers) | {"fc.weight", "hidden_norm.weight", "model.norm.weight"}


def _dspark_room(fields: Fields) -> set[str]:
    room = {f"layers.{index}.{name}.weight" for index in range(fields["num_hidden_layers"]) for name in _LINEAR}
    room |= {f"{name}.weight" for name in ("fc", "hidden_norm", "norm")}
    room |= {f"markov_head.markov_{one}.weight" for one in ("w1", "w2")}
    if fields["enable_confidence_head"]:
        room |= {f"confidence_head.proj.{one}" for one in ("weight", "bias")}
    return room


LOADERS = {
    "lm": language_model("checkpoints/hf/weight_mapper.py at 088aa36b0, HfWeightMapper; modeling_llama.py"),
    "eagle3": Loader(
        source="modeling_speculative.py at 00679c66c, Eagle3ForCausalLM.load_weights",
        rules=fusing(r"(layers\.0|midlayer)\.", "model.midlayer.", (*_NORMS, "hidden_norm"))
        | {
            r"(fc|norm|input_norm|fc_norm\.\d+)\.weight": r"model.\1.weight",
            r"embed_tokens\.weight": None,  # the target's, where it is as wide
            r"lm_head\.weight": "lm_head.weight",
            "d2t": "model.d2t",
            "t2d": None,
        },
        room=_eagle3_room,
        shared=frozenset({"lm_head.weight"}),
        demands={
            "draft_vocab_size": lambda ours, target: ours["draft_vocab_size"] is not None,
            "the target's width": lambda ours, target: ours["target_hidden_size"] == target["hidden_size"],
            "more than one state, else fc is left out": lambda ours, target: ours["num_aux_hidden_states"] > 1,
            "fc_norm alone, or norm_before_fc alone": lambda ours, target: (
                not (ours["fc_norm"] and ours["eagle_config"]["norm_before_fc"])
            ),
        },
    ),
    "dflash": Loader(
        source="modeling_dflash.py at 009d8fa43, DFlashForCausalLM.load_weights",
        rules=fusing(r"(layers\.\d+\.)", r"model.\1", (*_NORMS, "self_attn.q_norm", "self_attn.k_norm"))
        | {r"(fc|hidden_norm)\.weight": r"\1.weight", r"norm\.weight": "model.norm.weight"}
        | _SHARED,
        room=_dflash_room,
        demands={
            "layers are listed": lambda ours, target: bool(ours["dflash_config"]["target_layer_ids"]),
            "a mask of the target's": lambda ours, target: (
                ours["dflash_config"]["mask_token_id"] < target["vocab_size"]
            ),
            "layers of a type that it knows": lambda ours, target: ours["model_type"] == "qwen3",
            "no window": lambda ours, target: not ours["dflash_config"]["use_swa"] and not ours["use_sliding_window"],
        },
    ),
    "dspark": Loader(
        source="modeling_dspark_qwen3.py at 40289c86d, load_weights: strict, so that a name more stops it",
        rules={
            rf"(layers\.\d+\.(?:{'|'.join(_LINEAR)}))\.weight".replace("proj.", r"proj\."): r"\1.weight",
            r"(fc|norm|hidden_norm|markov_head\.markov_w[12])\.weight": r"\1.weight",
            r"confidence_head\.proj\.(weight|bias)": r"confidence_head.proj.\1",
        }
        | _SHARED,
        room=_dspark_room,
        demands={
            "target_layer_ids at the top": lambda ours, target: bool(ours["target_layer_ids"]),
            "a mask of the target's": lambda ours, target: ours["mask_token_id"] < target["vocab_size"],
            "a Markov head over all tokens": lambda ours, target: ours["vocab_size"] == target["vocab_size"],
            "slot 0 drafts": lambda ours, target: ours["sample_from_anchor"],
            "plain rotary positions": lambda ours, target: ours["rope_parameters"].get("rope_type") == "default",
        },
    ),
}
