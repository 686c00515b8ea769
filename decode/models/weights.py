"""Reading the weights of a model that was described."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from decode.common.environment import resolve_device
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.models.checkpoint_files import DAMAGED, damaged
from decode.models.compatibility import attention_of
from decode.models.gguf.file import open_gguf
from decode.models.gguf.weights import gguf_weights
from decode.models.model_folder import with_adapter
from decode.models.quantisation.torchao_schemes import scheme_settings


def read_weights(source: ModelConfig, config: PretrainedConfig, role: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of `config` with the weights of `source`, and transformers' report of what was missing, unexpected or of
    another shape, for `decode.models.checkpoint_check.check_report`; InputError where files are missing or damaged."""
    assert source.path is not None
    is_file = Path(source.path).is_file()
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if is_file else AutoModelForCausalLM
    try:
        loaded = kind.from_pretrained(
            **(_gguf_weights(source, config) if is_file else _checkpoint(source)),
            config=config,
            **_quantised_by(source),
            revision=source.revision,
            attn_implementation=attention_of(config, source.attn_implementation),
            trust_remote_code=source.trust_remote_code,
            ignore_mismatched_sizes=True,  # they are in the report, which names the two shapes
            output_loading_info=True,
        )
    except DAMAGED as error:
        raise InputError(damaged(f"{role}.path={source.path}", error)) from error
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):
            raise
        raise InputError(
            f"the weights of {role}.path={source.path} are not those that its config.json calls for: transformers "
            "merges some of them, and the report above names those that it could not. Copy the folder again"
        ) from error
    model, report = loaded
    model.name_or_path = model.config.name_or_path = source.path
    if getattr(model, "_hf_peft_config_loaded", False):
        raise InputError(with_adapter(source.path, role))
    return model, report


def _checkpoint(source: ModelConfig) -> dict[str, Any]:
    dtype = "auto" if source.dtype == "auto" else getattr(torch, source.dtype)
    return {"pretrained_model_name_or_path": source.path, "dtype": dtype}


def _gguf_weights(source: ModelConfig, config: PretrainedConfig) -> dict[str, Any]:
    """The tensors of a GGUF file as numbers, so that the model is a plain one, which can be trained and saved."""
    dtype = config.dtype if source.dtype == "auto" else getattr(torch, source.dtype)
    tensors = gguf_weights(open_gguf(source.path or "", "target"), config, cast(torch.dtype, dtype))
    return {"pretrained_model_name_or_path": None, "dtype": dtype, "state_dict": tensors}


def _quantised_by(source: ModelConfig) -> dict[str, Any]:
    """Kernels pack weights where these lie, so that a quantised model is loaded onto its device at once."""
    if source.quantization is None:
        return {"device_map": source.device_map}
    device = resolve_device(source.device)
    settings = scheme_settings(source.quantization, device)
    return {"device_map": source.device_map or {"": device}, "quantization_config": settings}
