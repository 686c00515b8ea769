"""The shape of a pruned model, found and checked by config.json alone, before any weight is read."""

from __future__ import annotations

import copy
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from decode.common.errors import ConfigError
from decode.common.typed_config import require
from train.drafts.pruning.pruning_config import PruningConfig

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite")
"""Model types whose layers are known: q_proj, k_proj, v_proj and o_proj, gate_proj, up_proj and down_proj, and nothing
else that is as wide as heads or MLP."""


def pruned_config(config: PretrainedConfig, pruning: PruningConfig, path: str) -> PretrainedConfig:
    """The configuration of what is left of a model: an ordinary one of its type, which every engine loads.

    Raises ConfigError for a model type that is not known here and for sizes that the model at `path` does not have.
    """
    require(
        config.model_type in KINDS,
        f"draft.pruning is for models of the types {', '.join(KINDS)}, and draft.init_from={path} is of type "
        f"{config.model_type}. Start from another model, or leave draft.pruning out",
    )
    _check_sizes(config, pruning, path)
    pruned = copy.deepcopy(config)
    kept = kept_layers(config.num_hidden_layers, pruning.layers or config.num_hidden_layers)
    fields = {"num_hidden_layers": len(kept), "intermediate_size": pruning.mlp_width or config.intermediate_size}
    fields |= _attention_fields(config, pruning)
    if getattr(config, "layer_types", None):
        fields["layer_types"] = [config.layer_types[layer] for layer in kept]
    for name, value in fields.items():
        setattr(pruned, name, value)
    return _valid(pruned, pruning, path)


def kept_layers(total: int, count: int) -> list[int]:
    """`count` of so many layers, the first and the last among them and the others evenly spaced; one is the first."""
    if count == 1:
        return [0]
    return [round(place * (total - 1) / (count - 1)) for place in range(count)]


def group_size(config: PretrainedConfig) -> int:
    """Query heads that share a key/value head."""
    return config.num_attention_heads // config.num_key_value_heads


def head_size(config: PretrainedConfig) -> int:
    """Channels of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _attention_fields(config: PretrainedConfig, pruning: PruningConfig) -> dict[str, Any]:
    """With the size of a head named: fewer heads than fill the width no longer tell it."""
    heads = pruning.heads or config.num_attention_heads
    groups = heads // group_size(config)
    return {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head_size(config)}


def _valid(pruned: PretrainedConfig, pruning: PruningConfig, path: str) -> PretrainedConfig:
    """As its own class builds it from config.json: a Llama's number of heads must divide its width, though the size of
    a head is given."""
    try:
        return type(pruned).from_dict(pruned.to_dict())
    except StrictDataclassError as error:
        raise ConfigError(
            f"draft.pruning.heads={pruning.heads} leaves a {pruned.model_type} model of draft.init_from={path} that "
            f"transformers and engines do not load: {error.__cause__ or error} Give a number of heads that divides it"
        ) from error


def _check_sizes(config: PretrainedConfig, pruning: PruningConfig, path: str) -> None:
    asked = {"layers": "num_hidden_layers", "mlp_width": "intermediate_size", "heads": "num_attention_heads"}
    for name, field in asked.items():
        size, found = getattr(pruning, name), getattr(config, field)
        require(
            size is None or size <= found,
            f"draft.pruning.{name}={size} are to be kept, and draft.init_from={path} has {found} ({field}); pruning "
            f"only leaves out. Give {found} or fewer",
        )
    shared = group_size(config)
    require(
        pruning.heads is None or pruning.heads % shared == 0,
        f"draft.pruning.heads={pruning.heads}, and {shared} query heads of draft.init_from={path} share a key/value "
        f"head: part of such a group has no place in a model. Give a multiple of {shared}",
    )
    widths = (config.hidden_size, pruning.mlp_width or config.intermediate_size, head_size(config) * shared)
    require(
        pruning.pattern is None or all(width % 4 == 0 for width in widths),
        f"draft.pruning.pattern={pruning.pattern} goes by fours, and rows of draft.init_from={path} are of "
        f"{', '.join(map(str, widths))} weights. Leave draft.pruning.pattern out, or give a multiple of 4",
    )
