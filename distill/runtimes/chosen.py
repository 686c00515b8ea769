"""The runtime that a configuration asks for."""

from __future__ import annotations

from decode.models.load import ModelDescription
from distill.config import DistillConfig
from distill.runtimes.openai_api.runtime import OpenAiRuntime
from distill.runtimes.runtime import Runtime
from distill.runtimes.served_runtime import ServedRuntime
from distill.runtimes.transformers_runtime import TransformersRuntime
from distill.runtimes.vllm_runtime import VllmRuntime


def open_runtime(config: DistillConfig, target: ModelDescription) -> Runtime:
    """Raises ConfigError and InputError for a target or an environment with which it cannot work; loads nothing."""
    dtype = target.dtype_name
    if config.target.runtime == "transformers":
        return TransformersRuntime(config, target, dtype)
    if config.target.runtime == "openai":
        return OpenAiRuntime(config, target)
    kind = VllmRuntime if config.target.url is None else ServedRuntime
    return kind(config, target, dtype)
