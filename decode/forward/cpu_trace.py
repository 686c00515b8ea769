"""Captures on a CPU: a TorchScript graph of one pass, as a function that can be freed.

`torch.jit.trace` enters the classes and graphs of all it traces in a table of the process that nothing is ever taken
out of, and with them the caches that their constants refer to: 43 MB a call where batch sizes took turns. So the graph
is made here without modules, their weights being inputs, and compiled into a table of its own that ends with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from decode.forward.packed_linear import Packed

WARM_UP = 3  # calls: the first ones specialise the graph to the shapes
NODE_BYTES = 4200  # measured: 14 MB for the 3,350 nodes of an 8-layer model, as traced and as specialised


class Trace:
    """The graph of `module` at inputs of these shapes, over its weights or, where they are packed, those."""

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...], packing: Packed) -> None:
        count = len(inputs)

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            return module(*given[:count])

        with packing.in_place():
            # packed weights cannot be written into a graph as constants
            self.weights = tuple(dict.fromkeys((*module.parameters(), *module.buffers())))
            graph, _ = torch._C._create_graph_by_tracing(run, (*inputs, *self.weights), _unnamed, True, False)
        self.num_bytes = NODE_BYTES * _forget_lines(graph)
        """Of the graph, about; weights and caches are others'."""
        self._call: Callable[..., tuple[Tensor, ...] | Tensor] = torch._C._create_function_from_graph("forward", graph)
        for _ in range(WARM_UP):
            self(*inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the module returns."""
        found = self._call(*inputs, *self.weights)
        return found if isinstance(found, tuple) else (found,)


def _forget_lines(graph: torch._C.Graph) -> int:
    """The number of nodes, which no longer hold the Python stack they come from: 40 % of a graph's memory."""
    nodes, blank = list(graph.nodes()), graph.create("prim::Constant", [], 1)
    for node in nodes:
        node.copyMetadata(blank)
    return len(nodes)


def _unnamed(tensor: Tensor) -> str:
    return ""
