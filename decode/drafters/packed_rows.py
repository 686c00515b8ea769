"""The rows of the target's output head that a head with a reduced vocabulary drafts from, packed while a capture is
made. SmolLM2's 8,192 of 576 numbers, one token, one core: 0.72 ms as they are and 0.61 ms packed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from decode.forward.packed_linear import Packed, PackedLinear, can_pack

NAME = "packed_rows"
"""Of the draft's submodule inside the block: a trace takes weights for its inputs, and looks for them there."""


class PackedRows(Packed):
    """Of one draft."""

    def __init__(self, draft: nn.Module, rows: Tensor) -> None:
        linear = nn.Linear(1, 1, bias=False)
        with torch.inference_mode(mode=False):
            linear.weight = nn.Parameter(rows, requires_grad=False)
        self._draft, self._layer = draft, PackedLinear(linear) if can_pack(linear) else None

    @property
    def models(self) -> tuple[nn.Module, ...]:
        return (self._draft,)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        if self._layer is None:
            yield
            return
        try:
            self._draft.add_module(NAME, self._layer)
            yield
        finally:
            delattr(self._draft, NAME)
