"""SGLang (wheel sglang 0.5.23, srt/models). Unknown names are skipped and missing ones left random, both unsaid."""

from __future__ import annotations

from tests.train.export.loaders.base import Fields, Loader, fused, fusing, is_reduced, language_model

_NORMS = ("input_layernorm", "post_attention_layernorm")
_BLOCK_NORMS = (*_NORMS, "self_attn.q_norm", "self_attn.k_norm")


def _layers(fields: Fields, prefix: str, norms: tuple[str, ...]) -> set[str]:
    return set().union(*(fused(f"{prefix}layers.{index}.", norms) for index in range(fields["num_hidden_layers"])))


def _eagle3_room(fields: Fields) -> set[str]:
    room = fused("model.layers.0.", (*_NORMS, "hidden_norm")) | {"model.fc.weight", "model.norm.weight"}
    room |= {"lm_head.weight"}
    if fields["eagle_config"].get("norm_before_fc", fields.get("norm_before_fc", False)):
        room |= {"model.input_norm.weight"}
    if fields.get("fc_norm"):
        room |= {f"model.fc_norm.{place}.weight" for place in range(fields["num_aux_hidden_states"])}
    return room | ({"hot_token_id"} if is_reduced(fields) else set())


def _block_room(fields: Fields) -> set[str]:
    return _layers(fields, "", _BLOCK_NORMS) | {"fc.weight", "norm.weight", "hidden_norm.weight"}


_PER_LAYER = fusing(r"(layers\.\d+\.)", r"\1", _BLOCK_NORMS)
_OWN = {r"(fc|norm|hidden_norm)\.weight": r"\1.weight"}
_LISTED = {
    "dflash_config.target_layer_ids are as many as fc reads, inside the target": lambda ours, target: (
        0 < len(ours["dflash_config"]["target_layer_ids"])
        and max(ours["dflash_config"]["target_layer_ids"]) < target["num_hidden_layers"]
    ),
    "block_size": lambda ours, target: ours["block_size"] >= 1,
    "block_size is said once, or alike": lambda ours, target: ours["dflash_config"]["block_size"] == ours["block_size"],
    "num_target_layers is the target's": lambda ours, target: ours["num_target_layers"] == target["num_hidden_layers"],
    "mask_token_id is a row of the target's": lambda ours, target: ours["mask_token_id"] < target["vocab_size"],
    "a layer type for each layer": lambda ours, target: len(ours["layer_types"]) == ours["num_hidden_layers"],
}
LOADERS = {
    "lm": language_model("models/llama.py, load_weights; as many tokens: speculative/standalone_worker_v2.py"),
    "eagle3": Loader(
        source="models/llama_eagle3.py, load_weights",
        rules=fusing(r"(midlayer|layers\.0)\.", "model.layers.0.", (*_NORMS, "hidden_norm"))
        | {
            r"(fc|norm|embed_tokens|input_norm|fc_norm\.\d+)\.weight": r"model.\1.weight",
            r"lm_head\.weight": "lm_head.weight",
            "d2t": "hot_token_id",
            "t2d": None,
        },
        room=_eagle3_room,
        shared=frozenset({"model.embed_tokens.weight"}),
        demands={
            "an output head of its own": lambda ours, target: not ours["tie_word_embeddings"],
            "draft_vocab_size, else the head is the target's": lambda ours, target: (
                ours["draft_vocab_size"] is not None
            ),
            "layers are one less than states": lambda ours, target: (
                [one + 1 for one in ours["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
                == ours["eagle_aux_hidden_state_layer_ids"]
            ),
            "as many states as fc reads": lambda ours, target: (
                ours["num_aux_hidden_states"] == len(ours["eagle_aux_hidden_state_layer_ids"])
            ),
            "the target's width": lambda ours, target: ours["target_hidden_size"] == target["hidden_size"],
            "no biases of attention": lambda ours, target: not ours["attention_bias"],
        },
    ),
    "dflash": Loader(
        source="models/dflash.py, load_weights; speculative/dflash_utils.py",
        rules=_PER_LAYER | _OWN,
        room=_block_room,
        demands=_LISTED,
    ),
    "dspark": Loader(
        source="models/dspark.py, load_weights; speculative/dspark_components/dspark_config.py",
        rules=_PER_LAYER
        | _OWN
        | {
            r"markov_head\.markov_(w1|w2)\.weight": r"markov_head.markov_\1.weight",
            r"confidence_head\.proj\.(weight|bias)": r"confidence_head.proj.\1",
        },
        room=lambda fields: (
            _block_room(fields) | {f"markov_head.markov_{one}.weight" for one in ("w1", "w2")} | _chances(fields)
        ),
        demands=_LISTED
        | {
            "a Markov head": lambda ours, target: ours["markov_rank"] > 0,
            "of a kind that it knows": lambda ours, target: ours["markov_head_type"] in ("vanilla", "gated", "rnn"),
            "which slots draft": lambda ours, target: isinstance(ours["sample_from_anchor"], bool),
            "whether it predicts chances": lambda ours, target: isinstance(ours["enable_confidence_head"], bool),
        },
    ),
}


def _chances(fields: Fields) -> set[str]:
    """Looked for where SGLANG_RAGGED_VERIFY_MODE is not static, its default."""
    return {f"confidence_head.proj.{one}" for one in ("weight", "bias")} if fields["enable_confidence_head"] else set()
