"""Captures on a GPU: kernels of one pass, recorded once and launched together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 3  # calls before recording, in which libraries choose their kernels


class Graph:
    """The CUDA graph of `module` at inputs of these shapes, which lie at fixed addresses like its results.

    `pool` is the memory that graphs of one runner share: they are replayed one after another, and results are copied
    out before the next one.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...], pool: Any) -> None:
        self.module = module  # tensors of its own are read by every replay: without it their memory is given away
        self.inputs = inputs
        with torch.cuda.device(inputs[0].device):  # else the current device is recorded, on which nothing happens
            self._warm_up()
            self.graph = torch.cuda.CUDAGraph()
            # of this thread: others must be able to allocate meanwhile
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self.results = module(*inputs)

    def _warm_up(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.module(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the module returns."""
        for fixed, new in zip(self.inputs, inputs, strict=True):
            fixed.copy_(new)
        self.graph.replay()
        return tuple(one.clone() for one in self.results)  # the next replay writes over them
