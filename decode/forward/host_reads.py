"""Noticing passes that look at values on the host, which no capture can follow.

A capture repeats the operations of one run. Where Python has read a value (`tolist()` of the tokens each expert gets,
say), the run's value is a constant of the capture, and other tokens get a wrong result without a word: 8 of 8 texts of
a JetMoE target were wrong so. Where a shape follows from values, Python may loop over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

OPERATORS = frozenset(
    {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select", "bincount"}
    | {"unique_consecutive", "unique_dim", "_unique", "_unique2", "unique_dim_consecutive"}
)
"""Those that return a value to Python, or a tensor whose shape follows from values."""
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
METHODS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""Reads that reach no operator."""


def host_reads(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[str]:
    """Names of what `module` at `inputs` reads values by, in the order met; empty where it reads none."""
    found: dict[str, None] = {}
    with _Functions(found), _Operators(found):
        module(*inputs)
    return list(found)


class _Operators(TorchDispatchMode):
    def __init__(self, found: dict[str, None]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        sizes_follow = func is torch.ops.aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None
        if name in OPERATORS or sizes_follow or (name in INDEXING and _by_mask(args[1])):
            self.found[name] = None
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, found: dict[str, None]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS:
            self.found[func.__name__] = None
        return func(*args, **(kwargs or {}))


def _by_mask(indices: list[Tensor | None]) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices)
