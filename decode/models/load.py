"""Loading models."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from decode.common.environment import resolve_device
from decode.config import ModelConfig
from decode.models.arithmetic import warn_if_emulated
from decode.models.checkpoint_check import check_report, is_quantised
from decode.models.describe import describe_model
from decode.models.weights import read_weights

QUICKLY_READ = 1 << 30  # bytes: weights that are there before a progress bar is of use


def load_model(source: ModelConfig, role: str = "target", computes_on: torch.device | None = None) -> PreTrainedModel:
    """The model in eval mode with frozen weights, on its device; checked first as by `describe_model`, and by
    transformers' own report of what it loaded. `computes_on` is where it will be moved to, if it will."""
    description = describe_model(source, role)
    if description.weight_bytes < QUICKLY_READ:
        hf_logging.disable_progress_bar()
    model, report = read_weights(source, description.config, role)
    if is_quantised(description.config):  # scales that only other engines use are left aside on purpose
        report |= {"unexpected_keys": ()}
    check_report(report, source, role)
    if source.device_map is None:
        model.to(resolve_device(source.device))  # type: ignore[arg-type]
    warn_if_emulated(model.dtype, computes_on or model.device, f"Set {role}.dtype=float32")
    return model.eval().requires_grad_(False)
