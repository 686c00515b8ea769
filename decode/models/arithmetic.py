"""Whether a device multiplies in half precision, or pretends to."""

from __future__ import annotations

import time
from functools import cache

import torch

from decode.common.progress import get_logger

log = get_logger("decode")

SIDE = 128  # of the matrices that are multiplied: 0.1 ms in float32 on one core
SLOW = 8
"""Times float32 from which on a product is taken for emulated; a core with AVX2 alone took 20."""


def warn_if_emulated(dtype: torch.dtype, device: torch.device, remedy: str) -> None:
    """Say so: nothing fails, and what takes seconds takes minutes. `remedy` says what to set."""
    if is_emulated(dtype, device):
        log.warning(
            "this CPU has no arithmetic for %s: its products take many times as long as in float32. %s",
            str(dtype).removeprefix("torch."), remedy,
        )  # fmt: skip


@cache
def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products in `dtype` are computed element by element, as on CPUs with AVX2 alone. oneDNN says so; builds
    without it are timed, which fails on a busy machine."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.backends.mkldnn.is_available():
        known = torch.ops.mkldnn
        knows = known._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else known._is_mkldnn_fp16_supported
        return not knows()
    return _seconds(dtype) > SLOW * _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """Of one product, the fastest of a few; the first one of a process sets kernels up."""
    one = torch.ones(SIDE, SIDE, dtype=dtype)
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        torch.mm(one, one)
        taken.append(time.perf_counter() - began)
    return min(taken)
