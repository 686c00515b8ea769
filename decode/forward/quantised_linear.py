"""Linear layers over torchao's integers by torch's own kernels for CPUs, put in place for a capture.

torchao's tensors cannot be traced, and its eager products widen all weights in every call. Ours compute the same, and
the same for any number of rows.

Measured on one core in bfloat16, milliseconds of processor time of a captured pass over 1 and 5 tokens: 8 layers of
width 512 as they are 2.9 and 3.5, int4 2.0 and 3.6, int8_dynamic 3.0 and 6.4; 6 layers of width 2048 as they are 23.7
and 28.5, int4 12.8 and 29.4, int8_dynamic 15.5 and 41.0. int8 takes what layers take that are not quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decode.forward.packed_linear import PackedLinear, can_pack

LEAST = torch.finfo(torch.float32).eps  # torchao's smallest scale of a token
BLOCK = 64  # rows that int4 is packed by: layers that fill them can lie one after another


class Int8Linear(nn.Module):
    """int8 weights alone, a scale a row: (..., d_in) -> (..., d_out).

    They run on a packed copy of the integers, which are exact in bfloat16 and float32. torch has a kernel for int8 that
    is faster for one row or two (2048 x 512 in bfloat16: 23 us for 32), and no use: it rounds once where products of
    more rows round twice, so that of 20 texts of a toy 17 parted between passes with and without drafts, and it reads
    beyond inputs whose width is no multiple of 16 (the process ends).
    """

    scale: Tensor

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        weights: list[Any] = [one.weight.data for one in layers]
        dtype = weights[0].dtype
        self.register_buffer("scale", _cat([one.scale.flatten().to(dtype) for one in weights]))
        self.bias = joined_bias(layers)
        widened = nn.Linear(1, 1, bias=False)
        widened.weight = nn.Parameter(_cat([one.qdata for one in weights]).to(dtype), requires_grad=False)
        self.widened = PackedLinear(widened) if can_pack(widened) else widened  # no bfloat16 kernels without AVX-512
        self.weight = self.widened.weight

    def forward(self, x: Tensor) -> Tensor:
        """The layers' own results, one after another, up to the order of sums."""
        return _with_bias(self.widened(_flat(x)) * self.scale, self.bias, x)


class Int4Linear(nn.Module):
    """int4 weights alone, a scale and a zero point a group: (..., d_in) -> (..., d_out)."""

    weight: Tensor
    scale: Tensor

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        weights: list[Any] = [one.weight.data for one in layers]
        self.group = weights[0].block_size[-1]
        self.register_buffer("weight", _cat([one.qdata for one in weights]))
        self.register_buffer("scale", _cat([one.scale_and_zero for one in weights], 1))
        self.bias = joined_bias(layers)

    def forward(self, x: Tensor) -> Tensor:
        """The layers' own results, one after another."""
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(_flat(x), self.weight, self.group, self.scale)
        return _with_bias(y, self.bias, x)


class Int8DynamicLinear(nn.Module):
    """int8 weights, a scale a row, and int8 activations, a scale a token: (..., d_in) -> (..., d_out)."""

    weight: Tensor
    scale: Tensor

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        weights: list[Any] = [one.weight.data for one in layers]
        self.register_buffer("weight", _cat([one.qdata for one in weights]))
        self.register_buffer("scale", _cat([one.scale.flatten() for one in weights]))
        self.bias = joined_bias(layers)

    def forward(self, x: Tensor) -> Tensor:
        """The layers' own results, one after another, bit for bit: sums of integers have no order."""
        flat = _flat(x)
        scale = (largest(flat) / 127.5).clamp(min=LEAST).float()
        whole = (flat * (1.0 / scale)).round().clamp(-128, 127).to(torch.int8)
        y = (torch.ops.aten._int_mm(whole, self.weight.t()) * scale).to(x.dtype) * self.scale
        return _with_bias(y, self.bias, x).to(x.dtype)


class FloatLinear(PackedLinear):
    """Weights in floating point."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        joined = nn.Linear(1, 1, bias=False)
        joined.weight = nn.Parameter(_cat([one.weight.detach() for one in layers]), requires_grad=False)
        joined.bias = joined_bias(layers)  # type: ignore[assignment]
        super().__init__(joined)


Kind = type[Int8Linear] | type[Int4Linear] | type[Int8DynamicLinear] | type[FloatLinear]


def kind_of(linear: nn.Linear) -> Kind | None:
    """What runs a layer, or several of its kind as one; None where nothing but itself does."""
    weight: Any = linear.weight.data
    if can_pack(linear):
        return FloatLinear
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    if getattr(weight, "act_pre_scale", None) is not None:
        return None
    if type(weight).__name__ == "Int4OpaqueTensor":
        return Int4Linear if weight.act_mapping_type is None else None
    if type(weight).__name__ != "Int8Tensor" or list(weight.block_size) != [1, weight.shape[1]]:
        return None
    asked = weight.act_quant_kwargs
    if asked is None:
        return Int8Linear
    symmetric = asked.mapping_type.name == "SYMMETRIC" and not asked.reduce_range and weight.act_quant_scale is None
    return Int8DynamicLinear if symmetric and type(asked.granularity).__name__ == "PerRow" else None


def can_join(layers: Sequence[nn.Linear]) -> bool:
    """Whether one layer can compute all of them."""
    kinds = {kind_of(one) for one in layers}
    blocks = Int4Linear not in kinds or all(one.out_features % BLOCK == 0 for one in layers)
    alike = {(one.in_features, one.weight.dtype, one.bias is None) for one in layers}
    return len(kinds) == 1 and None not in kinds and blocks and len(alike) == 1


def joined_bias(layers: Sequence[nn.Linear]) -> nn.Parameter | None:
    """The biases of layers that have one, one after another."""
    if layers[0].bias is None:
        return None
    return nn.Parameter(_cat([one.bias.detach() for one in layers]), requires_grad=False)


def _cat(parts: list[Tensor], along: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, along).contiguous()


def largest(flat: Tensor) -> Tensor:
    """(rows, d) -> (rows, 1), of each token alone: by one scale for a pass a token would depend on its company."""
    return flat.abs().amax(-1, keepdim=True)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()  # int4's kernel asks for it


def _with_bias(y: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return (y if bias is None else y + bias).view(*x.shape[:-1], y.shape[-1])
