"""Whether a device multiplies in half precision, or pretends to."""

from __future__ import annotations

import time

import torch

from decode.common.progress import get_logger

log = get_logger("decode")

SIDE = 128  # of the matrices that are multiplied: 0.1 ms in float32 on one core
SLOW = 8
"""Times float32: a core with AVX2 alone took 20, one with AVX-512 but without bfloat16 instructions about one."""


def warn_if_emulated(dtype: torch.dtype, device: torch.device, remedy: str) -> None:
    """Say so where products in `dtype` are computed element by element on this CPU: nothing fails, and a step that
    takes seconds takes minutes. `remedy` says what to set."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return
    times = _seconds(dtype) / _seconds(torch.float32)
    if times > SLOW:
        log.warning(
            "this CPU has no arithmetic for %s: its products take %.0f times as long as in float32. %s",
            str(dtype).removeprefix("torch."), times, remedy,
        )  # fmt: skip


def _seconds(dtype: torch.dtype) -> float:
    """Of one product, the fastest of a few; the first one of a process sets kernels up."""
    one = torch.ones(SIDE, SIDE, dtype=dtype)
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        torch.mm(one, one)
        taken.append(time.perf_counter() - began)
    return min(taken)
