"""Fused attention that also gives the log-sum-exp of its scores, and takes another one back for the gradients: a call
over a part of one row, whatever the device.

A CPU has one kernel. CUDA has two: FlashAttention-2, the faster one, of 16 bits and without a mask; and xformers'
memory-efficient one, of float32 too and with a mask, but under deterministic algorithms with a single block of threads
a head in backward. What each is given here is what its sources ask for (torch 2.13:
aten/src/ATen/native/transformers/cuda/attention_backward.cu, mem_eff_attention/kernel_backward.h,
flash_attn/flash_api.cpp), where no check would say that it is not so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HOST = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
HOST_BACK = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FLASH = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_BACK = torch.ops.aten._scaled_dot_product_flash_attention_backward
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention
EFFICIENT_BACK = torch.ops.aten._scaled_dot_product_efficient_attention_backward
NO_DROPOUT = 0.0
WIDEST_OF_FLASH = 256
ALIGNED = 16
"""Entries that rows of a mask are padded to in memory: the efficient kernel loads 16 bytes at once."""
LSE_BLOCK = 32
"""Queries that the efficient kernel pads the log-sum-exp to, and reads in backward, with no check of its bounds."""


@dataclass(frozen=True)
class Kernel:
    """A forward and a backward call, of tensors (1, H, t, d)."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    """(query, key, value, added) -> (mixed (1, H, t, d), log-sum-exp (1, H, t)); added (t, s) goes to the scores, and
    None is causal, of the same slots."""
    backward: Callable[..., Sequence[Tensor]]
    """(gradient, query, key, value, added, out, log-sum-exp) -> gradients of query, key and value. Those of out and
    log-sum-exp may be of more keys than there are here. On CUDA out lies in memory as (1, t, H, d)."""


def kernel_for(query: Tensor, masked: bool) -> Kernel:
    """The fastest there is."""
    if query.device.type == "cpu":
        return ON_CPU
    is_flash = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= WIDEST_OF_FLASH
    if masked or not is_flash or torch.cuda.get_device_capability(query.device) < (8, 0):
        return ON_CUDA
    return ON_CUDA_FAST


def has_kernel(one: Tensor) -> bool:
    """Whether keys (B, H, T, d) can be attended to so: CUDA's kernels are of no float64, and load 16 bytes at once."""
    if one.device.type != "cuda":
        return one.device.type == "cpu"
    dtype = computed_in(one)
    return dtype != torch.float64 and one.shape[-1] * dtype.itemsize % 16 == 0


def computed_in(one: Tensor) -> torch.dtype:
    """The dtype that sdpa would compute in. Kernels that are called by their own names autocast passes by."""
    device = one.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else one.dtype


def hiding(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """visible (t, s) bool -> what is added to scores. Finite still when a kernel turns it to powers of two: of a row
    that sees nothing the log-sum-exp is then next to nothing, where of one that is -inf throughout CUDA says 0."""
    rows, width = visible.shape
    added = torch.zeros(rows, -(-width // ALIGNED) * ALIGNED, dtype=dtype, device=visible.device)[:, :width]
    return added.masked_fill_(~visible, torch.finfo(dtype).min / 4)


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    return HOST(query, key, value, NO_DROPOUT, added is None, attn_mask=added)


def _back_on_cpu(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, out: Tensor, whole: Tensor
) -> Sequence[Tensor]:
    given = (one.contiguous() for one in (gradient, query, key, value, out, whole))
    return HOST_BACK(*given, NO_DROPOUT, added is None, attn_mask=added)


def _fast(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    assert added is None
    out, whole, *_ = FLASH(query, key, value, NO_DROPOUT, True)
    return out, whole


def _back_fast(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, out: Tensor, whole: Tensor
) -> Sequence[Tensor]:
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # not read without dropout; nor is its offset
    sizes = query.shape[2], key.shape[2]
    given = gradient, query, key, value, out, whole.contiguous()
    return FLASH_BACK(*given, None, None, *sizes, NO_DROPOUT, True, seed, seed[0])


def _efficient(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    out, whole, *_ = EFFICIENT(query, key, value, _of_heads(added, query), True, NO_DROPOUT, added is None)
    return out, whole[..., : query.shape[2]]


def _back_efficient(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, out: Tensor, whole: Tensor
) -> Sequence[Tensor]:
    length = query.shape[2]
    padded = whole.new_full((*whole.shape[:-1], -(-length // LSE_BLOCK) * LSE_BLOCK), torch.inf)  # as forward does
    padded[..., :length] = whole
    seed = torch.zeros((), dtype=torch.long)  # not read without dropout; nor is its offset
    given = gradient, query, key, value, _of_heads(added, query), out, padded, seed, seed
    return EFFICIENT_BACK(*given, NO_DROPOUT, [True, True, True, False], added is None)[:3]


def _of_heads(added: Tensor | None, query: Tensor) -> Tensor | None:
    """The same of each head, without a copy."""
    return None if added is None else added.expand(1, query.shape[1], -1, -1)


ON_CPU = Kernel(_on_cpu, _back_on_cpu)
ON_CUDA = Kernel(_efficient, _back_efficient)
ON_CUDA_FAST = Kernel(_fast, _back_fast)
