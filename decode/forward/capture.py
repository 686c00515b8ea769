"""Passes captured once and replayed as one unit: on short passes Python and kernel launches cost more than arithmetic.

A CUDA graph on a GPU; on a CPU a trace over packed weights. Measured on 2 cores: one token through the 28M target
9.9 ms eager, 6.4 ms captured; six steps of its one-layer draft 8.2 ms eager, 3.4 ms captured. `torch.compile` with
frozen weights reaches the same (5.7 against 6.0 ms) but compiles 10 seconds a shape, where a capture takes 0.3.
A pass that looks at values on the host is not captured, and a capture is compared with its pass at other tokens and at
another place before it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from decode.forward.cpu_trace import Trace
from decode.forward.cuda_graph import Graph
from decode.forward.host_reads import host_reads
from decode.forward.packed_linear import Packed

Pass = Callable[..., tuple[Tensor, ...]]
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # else 1e-2: packed weights sum in another order
FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""What models raise whose Python code cannot be traced; their plain passes have run before."""


class Uncapturable(Exception):
    """A pass that has to run as it is; the message says why."""


def capture(
    module: nn.Module, inputs: tuple[Tensor, ...], moved: tuple[Tensor, ...], packing: Packed, pool: Any = None
) -> Pass:
    """`module` captured at `inputs`; raises Uncapturable, and torch.OutOfMemoryError.

    `moved` are other inputs of the same shapes, where a capture that has baked values in would show. The module writes
    into caches, so it has to be called at `inputs` afterwards, for the caches to hold what these say. `pool` is where
    a GPU's captures lie.
    """
    devices = {str(one.device) for one in module.parameters()}
    if len(devices) > 1:
        raise Uncapturable(f"the weights lie on several devices ({', '.join(sorted(devices))})")
    with torch.inference_mode(mode=False), torch.no_grad(), _quiet():
        inputs, moved = _copied(inputs), _copied(moved)
        try:
            _refuse_host_reads(module, moved)
            replay = Graph(module, inputs, pool) if inputs[0].is_cuda else Trace(module, inputs, packing)
            same = all(_close(replay(*at), module(*at)) for at in (moved, inputs))
        except torch.OutOfMemoryError:  # a RuntimeError too, and nothing that the pass is to blame for
            raise
        except FAULTS as error:
            raise Uncapturable((str(error).strip() or repr(error)).splitlines()[-1]) from error
    if not same:
        raise Uncapturable("a capture changes the result")
    return replay


def _refuse_host_reads(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    reads = host_reads(module, inputs)
    if reads:
        raise Uncapturable(f"the model reads values of tensors while it runs ({', '.join(reads)})")


def _copied(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Ordinary tensors: those made in inference mode cannot be captured."""
    return tuple(one.clone() for one in inputs)


def _close(have: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(_same(one, other) for one, other in zip(have, want, strict=True))


def _same(have: Tensor, want: Tensor) -> bool:
    if not have.is_floating_point():
        return torch.equal(have, want)
    tolerance = TOLERANCE.get(have.dtype, 1e-2)
    return torch.allclose(have, want, rtol=tolerance, atol=tolerance)


@contextmanager
def _quiet() -> Iterator[None]:
    """Tracing warns of what is constant on purpose, and reads every property, of which `loss_function` warns."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
