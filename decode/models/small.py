"""Models made small from another one's config: random ones, of which it is known what a model does with its states
before any weight of its own is loaded, and one without layers, for its two ends."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from decode.common.environment import resolve_device
from decode.common.progress import quiet
from decode.config import ModelConfig
from decode.models.checkpoint_check import check_report
from decode.models.compatibility import attention_of
from decode.models.describe import describe_model
from decode.models.output_head import Ends, ends_of
from decode.models.weights import read_weights

LAYERS = 2
_HEADS = 4
_SIZES = {
    "vocab_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 32,
    "ffn_dim": 32,
}
"""Sizes on which no other one depends."""


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """A copy with `count` layers at most, in every part of the model, and without quantisation, which is of layers."""
    config = copy.deepcopy(config)
    for part in _parts(config):
        all_layers = getattr(part, "num_hidden_layers", None)
        if all_layers is None or all_layers <= count:
            continue
        for name, value in vars(part).items():  # one entry a layer
            if isinstance(value, list | tuple) and len(value) == all_layers:
                setattr(part, name, value[:count])
        part.num_hidden_layers = count
    if getattr(config, "quantization_config", None) is not None:
        delattr(config, "quantization_config")
    return config


def random_like(config: PretrainedConfig) -> PreTrainedModel:
    """In fp32 on the CPU, of `LAYERS` narrow layers and 64 tokens. No global generator is touched."""
    small = with_layers(config, LAYERS)
    for part in _parts(small):
        _make_narrow(part)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation=attention_of(config))
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.eval().requires_grad_(False)


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    """The config and those within it, of a tower say."""
    inner = [one for one in vars(config).values() if isinstance(one, PretrainedConfig)]
    return [config, *(part for one in inner for part in _parts(one))]


def _make_narrow(part: Any) -> None:
    """Heads keep their size, of which rotary positions are made."""
    for name, size in _SIZES.items():
        given = getattr(part, name, None)
        if isinstance(given, int) and given > size:
            setattr(part, name, size)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if hasattr(part, name):
            setattr(part, name, None)
    width, heads = getattr(part, "hidden_size", None), getattr(part, "num_attention_heads", None)
    if not width or not heads or heads <= _HEADS:
        return
    kv_heads, head_dim = getattr(part, "num_key_value_heads", None), getattr(part, "head_dim", None)
    if kv_heads:
        part.num_key_value_heads = _HEADS if kv_heads == heads else min(kv_heads, 2)
    part.hidden_size, part.num_attention_heads = _HEADS * (16 if head_dim else width // heads), _HEADS


def load_ends(source: ModelConfig) -> Ends:
    """Those of a checkpoint, of which no layer is read into memory: the model is loaded with none.

    Raises InputError as `decode.models.describe.describe_model` does.
    """
    config = with_layers(describe_model(source, loads=False).config, 0)  # a head that is packed too is reported missing
    with quiet():  # else it lists every weight of the layers that are left out on purpose
        model, report = read_weights(replace(source, device_map=None, quantization=None), config, role="target")
    check_report(report | {"unexpected_keys": ()}, source, role="target")
    return ends_of(model.to(resolve_device(source.device)).eval().requires_grad_(False))  # type: ignore[arg-type]
