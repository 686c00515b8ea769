"""Layers of heads that draft a block in one pass: Qwen3's, and those of DFlash2, between short convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from decode.drafters.layers import MLP, Extend

if TYPE_CHECKING:
    from decode.drafters.head_config import HeadConfig


class BlockLayer(nn.Module):
    """A decoder layer as Qwen3 has it, or without `qk_norm` Llama; what it attends to besides its own slots is the
    business of `extend`."""

    def __init__(self, config: HeadConfig, qk_norm: bool = True, bias: bool = False) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = config.attention(qk_norm=qk_norm, bias=bias)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = MLP(width, config.mlp_width)

    def forward(self, x: Tensor, positions: Tensor, extend: Extend) -> Tensor:
        """x (B, T, d), positions (B, T) -> (B, T, d)."""
        x = x + self.self_attn(self.input_layernorm(x), positions, extend)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockConvolution(nn.Module):
    """Short convolutions over the slots of a block before and after a sublayer, by numbers that its input gives:

    y_t = sum over taps j of (base[j] + delta_t[j, group]) * x_(t - j), where x is 0 before the block.
    """

    def __init__(self, width: int, slots: int, taps: int, group: int) -> None:
        """It starts as the identity."""
        super().__init__()
        self.slots, self.group = slots, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.base_kernel.data[:, 0] = 1
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, normed: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """normed (B, M * S, d) -> (B, M * S, d), what the sublayer makes of it; M blocks of S slots."""
        delta = self.kernel_projection(normed).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        before, after = (self.base_kernel + delta.repeat_interleave(self.group, -1)).unbind(-3)
        return self._over(sublayer(self._over(normed, before)), after)

    def _over(self, x: Tensor, kernel: Tensor) -> Tensor:
        """x (B, M * S, d) by kernel (B, M * S, taps, d)."""
        blocks = x.unflatten(1, (-1, self.slots))
        kernels = kernel.unflatten(1, (-1, self.slots)).unbind(-2)
        moved = (pad(blocks, (0, 0, tap, 0))[:, :, : self.slots] for tap in range(len(kernels)))
        return torch.stack([one * by for one, by in zip(moved, kernels, strict=True)]).sum(0).flatten(1, 2)


class ConvolvedLayer(BlockLayer):
    """A layer of a block whose attention and MLP stand between convolutions; those of the context's keys and values
    do not."""

    def __init__(self, config: HeadConfig, slots: int, taps: int, group: int) -> None:
        super().__init__(config)
        sizes = (config.hidden_size, slots, taps, group)
        self.attention_conv, self.mlp_conv = BlockConvolution(*sizes), BlockConvolution(*sizes)

    def forward(self, x: Tensor, positions: Tensor, extend: Extend) -> Tensor:
        """x (B, M * S, d), positions (B, M * S) -> (B, M * S, d)."""
        x = x + self.attention_conv(self.input_layernorm(x), lambda u: self.self_attn(u, positions, extend))
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)
