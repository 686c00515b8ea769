"""Which targets vLLM's engine gives the states of; what it does not take is refused before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from decode.common.errors import ConfigError, InputError
from decode.models.checkpoint_check import is_quantised
from decode.models.checkpoint_files import read_headers
from decode.models.load import ModelDescription
from distill.config import TargetConfig

KNOWN = ("llama", "qwen3")
"""Model types whose states and p were found to be those of transformers."""
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
OTHERWISE = "use target.runtime=transformers"


def check_target(target: ModelDescription) -> None:
    """Raise InputError for a target that the engine, or the norm and head that are read here, cannot serve."""
    config, path = target.config.get_text_config(), f"target.path={target.path}"
    if getattr(config, "kv_lora_rank", None):
        raise InputError(
            f"{path} is a {config.model_type} model with latent attention (MLA), and vLLM gives no hidden states of "
            f"such models, from which p is made; {OTHERWISE}"
        )
    if Path(target.path).is_file():
        raise InputError(
            f"{path} is a GGUF file, and target.runtime=vllm is handed a folder: give that of the same model in "
            f"transformers format, or {OTHERWISE}"
        )
    check_plain_ends(target)
    if config.model_type not in KNOWN:
        raise InputError(
            f"{path} is a {config.model_type} model, and target.runtime=vllm is known to give the states of "
            f"{' and '.join(KNOWN)} models only; {OTHERWISE}"
        )


def check_plain_ends(target: ModelDescription) -> None:
    """Raise InputError for a quantised folder whose output head or last norm are packed as well: p is made of them
    here. Most leave both alone; those of a hub id are judged once they are read."""
    if not is_quantised(target.config) or not Path(target.path).is_dir():
        return
    tensors = read_headers(Path(target.path), "target")
    head = "model.embed_tokens.weight" if target.config.get_text_config().tie_word_embeddings else "lm_head.weight"
    packed = [name for name in (head, "model.norm.weight") if name not in tensors or tensors[name].dtype not in PLAIN]
    if packed:
        raise InputError(
            f"target.path={target.path} is quantised, {' and '.join(packed)} as well, and target.runtime=vllm makes p "
            "of hidden states by the checkpoint's own norm and head, read as plain tensors. Quantise it with the head "
            f"left as it is (most tools do), give the model in half precision, or {OTHERWISE}"
        )


def devices(asked: TargetConfig) -> int:
    """That an engine runs on. The one that reads shares each layer out over all of them: vLLM gives no states of a
    model that is held in groups of layers."""
    return asked.tensor_parallel_size * asked.pipeline_parallel_size


def check_sizes(asked: TargetConfig, target: ModelDescription) -> None:
    """Raise ConfigError where the model cannot be shared out as asked, or the devices seen here are too few."""
    config = target.config.get_text_config()
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 1
    fitting = [size for size in range(1, heads + 1) if heads % size == 0 and not (groups % size and size % groups)]
    if devices(asked) not in fitting:
        pipeline = asked.pipeline_parallel_size
        told = f" (times pipeline_parallel_size={pipeline} as it reads)" if pipeline > 1 else ""
        raise ConfigError(
            f"target.tensor_parallel_size={asked.tensor_parallel_size}{told} does not share out the {heads} attention "
            f"heads and {groups} key-value heads of {target.path}; use {' or '.join(map(str, fitting))} in all"
        )
    if asked.pipeline_parallel_size > target.num_layers:
        raise ConfigError(
            f"target.pipeline_parallel_size={asked.pipeline_parallel_size} is more than the {target.num_layers} layers "
            f"of {target.path}; use fewer"
        )
    there = torch.accelerator.device_count()
    if there and devices(asked) > there:
        raise ConfigError(
            f"target.tensor_parallel_size={asked.tensor_parallel_size} and target.pipeline_parallel_size="
            f"{asked.pipeline_parallel_size} ask for {devices(asked)} devices, and here are {there}; use fewer, or a "
            "server on several machines (target.url)"
        )


def check_alone() -> None:
    """Raise ConfigError under a launcher of several processes, each of which would start engines on the same device."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise ConfigError(
            f"target.runtime=vllm and {ranks} processes, each of which would start an engine of its own on the same "
            f"device; start one by `python -m distill`, or {OTHERWISE}"
        )
