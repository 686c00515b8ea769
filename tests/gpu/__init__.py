"""Tests on a device: CUDA, or what the environment variable DRAFTSMITH_DEVICE names, so that a CPU proves the tests."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import tiny

DEVICE = torch.device(os.environ.get("DRAFTSMITH_DEVICE", "cuda"))
ON_A_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "DRAFTSMITH_DEVICE" not in os.environ and not torch.cuda.is_available(),
        reason="needs CUDA, or a device by DRAFTSMITH_DEVICE",
    ),
]
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA")

# their stubs know no `to(device)`
tiny_llama: Callable[..., Any] = tiny.tiny_llama
MODELS: dict[str, Callable[[], Any]] = {**tiny.MODELS}


def deep_target(place: torch.device = DEVICE, dtype: torch.dtype = torch.float64) -> Any:
    """Of layers enough for every head's taps."""
    return tiny_llama(num_layers=6, dtype=dtype).requires_grad_(False).to(place)
