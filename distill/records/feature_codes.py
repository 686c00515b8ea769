"""Hidden states of a token as bytes: exact, in eight bits a channel, or as principal components of all layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from decode.common.checked_json import Count, Size
from decode.models.hidden_states import FINAL
from distill.records.config import FeatureCodeName, FeatureConfig

Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]
Tensors = Mapping[str, Tensor]

LEVELS = 127  # codes of one sign: -128 stays unused, so that a range is symmetric around its middle
LEAST_STEP = 0.01  # of the median step: a channel that hardly moved in calibration must not stretch all rows later
MOST_STRETCH = 65504.0  # the largest float16


@dataclass(frozen=True)
class FeatureLayout:
    """What a record folder keeps of a token's hidden states; part of its manifest."""

    layers: Annotated[list[Annotated[int, Field(ge=FINAL)]], Field(min_length=1)]
    """Layers of the target whose hidden states are kept, in the order they are laid out."""
    hidden_size: Size
    code: FeatureCodeName
    components: Count
    """Principal components with code=pca; 0 else."""

    @classmethod
    def of(cls, config: FeatureConfig, hidden_size: int) -> FeatureLayout | None:
        """The layout that `config` asks for, None where it keeps no layer."""
        if not config.layers:
            return None
        channels = len(config.layers) * hidden_size
        components = min(config.components or max(1, channels // 6), channels) if config.code == "pca" else 0
        return cls(list(config.layers), hidden_size, config.code, components)

    @property
    def is_fitted(self) -> bool:
        """Whether the code has scales of its own, which are fitted once a run."""
        return self.code != "bf16"

    @property
    def shapes(self) -> Shapes:
        """Shape of a token's row and dtype of each array."""
        names = self.layers if self.code != "pca" else ["pca"]
        width = self.components if self.code == "pca" else self.hidden_size
        if self.code == "bf16":  # numpy has no bfloat16: its bits are kept
            return {f"features.{name}.bits": ((width,), np.dtype(np.int16)) for name in names}
        codes: Shapes = {f"features.{name}.codes": ((width,), np.dtype(np.int8)) for name in names}
        return codes | {f"features.{name}.stretch": ((), np.dtype(np.float16)) for name in names}

    @property
    def fitted_shapes(self) -> Shapes:
        """Shape and dtype of the tensors that a run fits to its first texts."""
        states, components = (len(self.layers), self.hidden_size), (self.components,)
        shapes = {"mean": states, "middle": states, "step": states}
        if self.code == "pca":
            channels = len(self.layers) * self.hidden_size
            shapes |= {"spread": states[:1], "basis": (*components, channels), "middle": components, "step": components}
        return {name: (shape, np.dtype(np.float32)) for name, shape in shapes.items() if self.is_fitted}

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk of one token."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.shapes.values())

    def names_of(self, layers: Sequence[int]) -> list[str]:
        """The arrays that have to be read for these layers: with pca all, since its components mix them."""
        if self.code == "pca":
            return list(self.shapes) if layers else []
        wanted = tuple(f"features.{layer}." for layer in layers)
        return [name for name in self.shapes if name.startswith(wanted)] if wanted else []


class FeatureCode(ABC):
    """A code of hidden states (R, n, d): rows to arrays and back."""

    def __init__(self, layout: FeatureLayout, fitted: Tensors) -> None:
        """`fitted` holds what a run fitted on its first texts: `mean` (n, d) and the code's own tensors, float32."""
        self.layout, self.fitted = layout, fitted

    def to(self, device: torch.device | str) -> FeatureCode:
        """The same code with its tensors on `device`."""
        return type(self)(self.layout, {name: tensor.to(device) for name, tensor in self.fitted.items()})

    @abstractmethod
    def encode(self, states: Tensor) -> dict[str, Tensor]:
        """states (R, n, d), layers as in the layout -> the arrays of `layout.shapes`, R rows each, on their device."""

    @abstractmethod
    def decode(self, arrays: Tensors, layers: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """(R, len(layers), d) of some of the layout's layers; only the arrays of `names_of` are looked at."""

    def squared_errors(self, states: Tensor, arrays: Tensors) -> Tensor:  # (R, n, d) -> (R, n) float32
        """|x - x_hat|^2 / |x - mean|^2 of each token and layer, x_hat being what a reader gets.

        Against the deviation from the mean, since some channels of a Llama or Gemma are large in every token alike: a
        code that kept nothing else would look good against |x|^2. A ratio per token, since a first token may be a
        thousand times as long as the others, and would be all that a pooled one shows.
        """
        states = states.float()
        mean = self.fitted.get("mean", torch.zeros((), device=states.device))
        error = (self.decode(arrays, self.layout.layers) - states).square().sum(-1)
        return error / (states - mean).square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)


class Bits(FeatureCode):
    """bfloat16 as it is; what a target in another precision gives is rounded to it."""

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        bits = states.bfloat16().view(torch.int16)
        return dict(zip(self.layout.shapes, bits.unbind(1), strict=True))

    def decode(self, arrays: Tensors, layers: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.stack([arrays[f"features.{layer}.bits"] for layer in layers], 1).view(torch.bfloat16).to(dtype)


class Int8(FeatureCode):
    """Eight bits a channel, each channel on a grid of its own (`middle`, `step` (n, d)).

    The error is at most stretch * step / 2 a channel, and stretch is 1 for a token that lies in the fitted ranges.
    """

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        codes, stretch = on_grid(states.float(), self.fitted["middle"], self.fitted["step"])
        parts = [*codes.unbind(1), *stretch.unbind(1)]
        return dict(zip(self.layout.shapes, parts, strict=True))

    def decode(self, arrays: Tensors, layers: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        codes, stretch = (
            torch.stack([arrays[f"features.{layer}.{kind}"] for layer in layers], 1) for kind in ("codes", "stretch")
        )
        which = [self.layout.layers.index(layer) for layer in layers]
        return off_grid(codes, stretch, self.fitted["middle"][which], self.fitted["step"][which]).to(dtype)


class Pca(FeatureCode):
    """Eight bits for each of k principal components of all layers together.

    y = (x - mean) / spread with one spread (n,) a layer, so that layers count alike however long their states are;
    z = basis y, basis (k, n * d) orthonormal; z is laid on a grid (`middle`, `step` (k,)). The error in y is exactly
    what lies outside of the basis plus the error of z.
    """

    def __init__(self, layout: FeatureLayout, fitted: Tensors) -> None:
        super().__init__(layout, fitted)
        self._parts: dict[tuple[int, ...], Tensor] = {}

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        components = self.standardised(states) @ self.fitted["basis"].T
        coded = on_grid(components, self.fitted["middle"], self.fitted["step"])
        return dict(zip(self.layout.shapes, coded, strict=True))

    def decode(self, arrays: Tensors, layers: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        fitted, layout = self.fitted, self.layout
        which = [layout.layers.index(layer) for layer in layers]
        codes, stretch = (arrays[f"features.pca.{kind}"] for kind in ("codes", "stretch"))
        components = off_grid(codes, stretch, fitted["middle"], fitted["step"])
        rows = (components @ self._basis_of(tuple(which))).unflatten(1, (len(which), layout.hidden_size))
        return (rows * fitted["spread"][which, None] + fitted["mean"][which]).to(dtype)

    def standardised(self, states: Tensor) -> Tensor:  # (R, n, d) -> (R, n * d) float32
        """y of each row."""
        return ((states.float() - self.fitted["mean"]) / self.fitted["spread"][:, None]).flatten(1)

    def _basis_of(self, which: tuple[int, ...]) -> Tensor:  # (k, len(which) * d)
        """The basis on some layers; a reader wants the same ones every time, and a copy is 100 MB for large targets."""
        layout = self.layout
        if which == tuple(range(len(layout.layers))):
            return self.fitted["basis"]
        if which not in self._parts:
            whole = self.fitted["basis"].unflatten(1, (len(layout.layers), layout.hidden_size))
            self._parts = {which: whole[:, which].flatten(1)}
        return self._parts[which]


CODES: dict[FeatureCodeName, type[FeatureCode]] = {"bf16": Bits, "int8": Int8, "pca": Pca}


def on_grid(rows: Tensor, middle: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:  # (..., C) -> (..., C), (...)
    """(codes int8, stretch float16) with rows ~ middle + stretch * step * code.

    A row outside of the fitted ranges is stretched as a whole rather than cut: the state of a first token is dominated
    by a few channels hundreds of times as large as in any other token, which say nothing if they are cut, and beside
    which its other channels say nothing.
    """
    offsets = (rows - middle) / step
    stretch = (offsets.abs().amax(-1) / LEVELS).clamp(1.0, MOST_STRETCH).half()
    codes = (offsets / stretch.float().unsqueeze(-1)).round().clamp(-LEVELS, LEVELS)
    return codes.to(torch.int8), stretch


def off_grid(codes: Tensor, stretch: Tensor, middle: Tensor, step: Tensor) -> Tensor:
    """The float32 rows of codes (..., C) and stretch (...)."""
    return codes.float() * stretch.float().unsqueeze(-1) * step + middle


def grid_of(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """`middle` and `step` of channels (..., C) that reach from `low` to `high`."""
    step = (high - low) / (2 * LEVELS)
    least = (LEAST_STEP * step.median(-1, keepdim=True).values).clamp_min(torch.finfo(torch.float32).tiny)
    return {"middle": (low + high) / 2, "step": torch.maximum(step, least)}
