"""Which targets vLLM's engine gives the states of; what it does not take is refused before anything is loaded."""

from __future__ import annotations

import os

from decode.common.errors import ConfigError, InputError
from decode.models.checkpoint_check import is_quantised
from decode.models.load import ModelDescription

KNOWN = ("llama", "qwen3")
"""Model types whose states and p were found to be those of transformers."""
OTHERWISE = "use target.runtime=transformers"


def check_target(target: ModelDescription) -> None:
    """Raise InputError for a target that the engine, or the norm and head that are read here, cannot serve."""
    config, path = target.config.get_text_config(), f"target.path={target.path}"
    if getattr(config, "kv_lora_rank", None):
        raise InputError(
            f"{path} is a {config.model_type} model with latent attention (MLA), and vLLM gives no hidden states of "
            f"such models, from which p is made; {OTHERWISE}"
        )
    if is_quantised(target.config):
        raise InputError(
            f"{path} is quantised, and target.runtime=vllm reads the head and the last norm as plain tensors of the "
            f"checkpoint; give the model in half precision, or {OTHERWISE}"
        )
    if config.model_type not in KNOWN:
        raise InputError(
            f"{path} is a {config.model_type} model, and target.runtime=vllm is known to give the states of "
            f"{' and '.join(KNOWN)} models only; {OTHERWISE}"
        )


def check_alone() -> None:
    """Raise ConfigError under a launcher of several processes, each of which would start engines on the same device."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise ConfigError(
            f"target.runtime=vllm and {ranks} processes, each of which would start an engine of its own on the same "
            f"device; start one by `python -m distill`, or {OTHERWISE}"
        )
