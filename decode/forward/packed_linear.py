"""Linear layers with weights in the layout of the CPU's matrix kernels, put in place of a model's own for a capture.

Unpacked, oneDNN reorders the weights in every call. Measured on 2 cores, the 28M target in bfloat16: a pass of 7 tokens
9.2 ms unpacked, 6.4 ms packed, with bit-equal logits. Packed weights are copies, so they double the memory of the
linear layers; models above `MOST_BYTES` keep their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

MOST_BYTES = 4 << 30
ROWS = 8  # the layout is chosen for about this many rows; measured equally fast for 1, 7 and 16


class Packed(Protocol):
    """Weights in the layout of a CPU's kernels, of one model or of several that run together."""

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """Those whose modules are exchanged: who runs passes over them holds them (`passes.holding`)."""
        ...

    def in_place(self) -> AbstractContextManager[None]:
        """Inside the block, modules run on them."""
        ...


@dataclass(frozen=True)
class Together(Packed):
    """Weights of several models that run as one unit."""

    parts: tuple[Packed, ...]

    @property
    def models(self) -> tuple[nn.Module, ...]:
        return tuple(model for one in self.parts for model in one.models)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self.parts:
                stack.enter_context(one.in_place())
            yield


@cache
def _script() -> torch.jit.CompilationUnit:
    """A scripted call, because tracing cannot write down the operator's list of optional numbers; made when wanted,
    because builds without oneDNN lack the operator."""
    return torch.jit.CompilationUnit("""
def linear(x, weight, bias):
    # type: (Tensor, Tensor, Optional[Tensor]) -> Tensor
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
""")


class PackedLinear(nn.Module):
    """A linear layer over packed weights: (..., d_in) -> (..., d_out)."""

    weight: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """The layer's own result up to the order of sums."""
        return _script().linear(x, self.weight, self.bias)


def can_pack(linear: nn.Linear) -> bool:
    """Whether the kernels know its weights, and nothing has to run beside it."""
    weight = linear.weight
    plain = type(weight) in (Tensor, nn.Parameter)  # quantised storage calls itself float32 too
    if weight.device.type != "cpu" or not plain or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
