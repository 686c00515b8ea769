"""The weights of a model without some of its layers, MLP channels and heads: those of the smallest weights go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from decode.models.compatibility import attention_of
from decode.models.structure import layers_of
from train.drafts.pruning.pruned_shape import head_size, kept_layers


def without_parts(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """A model of `config` (`pruned_shape.pruned_config`) with those weights of `model` that it keeps, in their order.

    A channel weighs |gate| |up| |down|, a group of heads |q| |k| |v| |o|, the norms of its slices: the product stays
    as it is where a factor moves from one matrix into the next, which changes no output.
    """
    dtype, attention = model.dtype, attention_of(config)
    pruned: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    ends = {name: value for name, value in model.state_dict().items() if ".layers." not in name}
    pruned.load_state_dict(ends, strict=False)
    sources = layers_of(model)
    kept = kept_layers(len(sources), config.num_hidden_layers)
    for layer, source in zip(layers_of(pruned), (sources[place] for place in kept), strict=True):
        layer.load_state_dict(_kept_slices(source, model.config, config))
    return pruned


def heaviest_channels(mlp: Any, count: int) -> Tensor:  # (count,) ascending
    """Of a gated MLP."""
    weight = mlp.gate_proj.weight.norm(dim=1) * mlp.up_proj.weight.norm(dim=1) * mlp.down_proj.weight.norm(dim=0)
    return weight.topk(count).indices.sort().values


def heaviest_groups(attention: Any, groups: int, count: int) -> Tensor:  # (count,) ascending
    """Of attention with so many key/value heads, each with the query heads that share it."""
    slices = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.o_proj.weight.T]
    norms = [one.reshape(groups, -1).norm(dim=1) for one in slices]
    return torch.stack(norms).prod(dim=0).topk(count).indices.sort().values


@torch.no_grad()
def _kept_slices(layer: Any, config: PretrainedConfig, pruned: PretrainedConfig) -> dict[str, Tensor]:
    """The state of a layer for one of the pruned shape."""
    channels = heaviest_channels(layer.mlp, pruned.intermediate_size)
    groups = heaviest_groups(layer.self_attn, config.num_key_value_heads, pruned.num_key_value_heads)
    shared = config.num_attention_heads // config.num_key_value_heads
    queries, keys = (_places(groups, size * head_size(config)) for size in (shared, 1))
    rows = {"gate_proj": channels, "up_proj": channels, "q_proj": queries, "k_proj": keys, "v_proj": keys}
    columns = {"down_proj": channels, "o_proj": queries}
    kept = {}
    for name, value in layer.state_dict().items():
        owner = name.split(".")[-2]
        if owner in rows:
            value = value[rows[owner]]
        if owner in columns and value.ndim == 2:
            value = value[:, columns[owner]]
        kept[name] = value
    return kept


def _places(groups: Tensor, size: int) -> Tensor:
    """Of groups of `size` rows each, every row."""
    return (groups[:, None] * size + torch.arange(size)).flatten()
