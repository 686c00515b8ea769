"""Passes captured once and replayed as one unit: on short passes Python and kernel launches cost more than arithmetic.

A CUDA graph on a GPU; on a CPU a trace over packed weights. Measured on 2 cores: one token through the 28M target
9.9 ms eager, 6.4 ms captured; six steps of its one-layer draft 8.2 ms eager, 3.4 ms captured. `torch.compile` with
frozen weights reaches the same (5.7 against 6.0 ms) but compiles 10 seconds a shape, where a capture takes 0.3.
A capture is compared with the pass it stands for, at two places, and falls back to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from decode.house.progress import get_logger

log = get_logger("decode")

WARM_UP = 3  # calls: the first replays specialise to the shapes
Pass = Callable[..., tuple[Tensor, ...]]


class Packed(Protocol):
    """Weights in the layout of a CPU's kernels (`decode.packed`)."""

    def in_place(self) -> AbstractContextManager[None]:
        """Inside the block, modules run on them."""
        ...


def capture(module: nn.Module, inputs: tuple[Tensor, ...], moved: tuple[Tensor, ...], packing: Packed) -> Pass:
    """`module` captured at `inputs`, or itself where capturing fails or changes what it returns.

    `moved` are other inputs of the same shapes, where a capture that has baked values in would show. The module writes
    into caches: it is called once more at `inputs` last, so that they hold what these say.
    """
    with torch.inference_mode(mode=False), torch.no_grad(), _quiet():
        inputs, moved = _copied(inputs), _copied(moved)
        try:
            replay = _graph(module, inputs) if inputs[0].is_cuda else _trace(module, inputs, packing)
        except RuntimeError as error:
            log.warning("passes run uncaptured, which is slower: %s", str(error).strip().splitlines()[-1])
            module(*inputs)
            return cast(Pass, module)
        same = all(_close(replay(*at), module(*at)) for at in (moved, inputs))
    if same:
        return replay
    log.warning("passes run uncaptured, which is slower: a capture of %s changes its result", type(module).__name__)
    return cast(Pass, module)


def _copied(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Ordinary tensors: those made in inference mode cannot be captured."""
    return tuple(one.clone() for one in inputs)


def _trace(module: nn.Module, inputs: tuple[Tensor, ...], packing: Packed) -> Pass:
    with packing.in_place():
        traced = torch.jit.trace(module, inputs, check_trace=False)
    replay = cast(Pass, traced)
    for _ in range(WARM_UP):
        replay(*inputs)
    return replay


def _graph(module: nn.Module, inputs: tuple[Tensor, ...]) -> Pass:
    """Kernels are recorded once and launched together; inputs and results lie at fixed addresses."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            module(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = module(*inputs)

    def replay(*given: Tensor) -> tuple[Tensor, ...]:
        for fixed, new in zip(inputs, given, strict=True):
            fixed.copy_(new)
        graph.replay()
        return tuple(one.clone() for one in results)  # the next replay writes over them

    return replay


def _close(have: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-2, atol=1e-2) if a.is_floating_point() else torch.equal(a, b)
        for a, b in zip(have, want, strict=True)
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Tracing warns of what is constant on purpose, and reads every property, of which `loss_function` warns."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    hf_logging.set_verbosity(verbosity)
