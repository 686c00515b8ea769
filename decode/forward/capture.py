"""Passes captured once and replayed as one unit: on short passes Python and kernel launches cost more than arithmetic.

A CUDA graph on a GPU; on a CPU a trace over packed weights. Measured on 2 cores: one token through the 28M target
9.9 ms eager, 6.4 ms captured; six steps of its one-layer draft 8.2 ms eager, 3.4 ms captured. `torch.compile` with
frozen weights reaches the same (5.7 against 6.0 ms) but compiles 10 seconds a shape, where a capture takes 0.3.
A pass that looks at values on the host is not captured, and a capture is compared with its pass (`agreement`) at other
tokens and at another place before it is used."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from decode.common.progress import quiet
from decode.forward.agreement import alike, alike_but_for_near_ties, near, precision_of, shadow, the_other_way
from decode.forward.packed_linear import Packed

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


Pass = Callable[..., tuple[Tensor, ...]]
FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""What models raise whose Python code cannot be traced; their plain passes have run before."""


class Uncapturable(Exception):
    """A pass that has to run as it is; the message says why."""


def capture(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    moved: tuple[Tensor, ...],
    packing: Packed,
    pool: Any = None,
    stored: Callable[[], list[Tensor]] = list,
) -> Pass:
    """`module` captured at `inputs`; raises Uncapturable, and torch.OutOfMemoryError.

    `moved` are other inputs of the same shapes, where a capture that has baked values in would show. The module writes
    into caches, so it has to be called at `inputs` afterwards, for the caches to hold what these say. Caches that it
    writes and does not read again it names in `written`. `pool` is where a GPU's captures lie, and `stored` gives the
    keys and values that are compared there: a trace that dropped one would have read it.
    """
    devices = {str(one.device) for one in module.parameters()}
    if len(devices) > 1:
        raise Uncapturable(f"the weights lie on several devices ({', '.join(sorted(devices))})")
    with torch.inference_mode(mode=False), torch.no_grad(), quiet(), warnings.catch_warnings(action="ignore"):
        inputs, moved = _copied(inputs), _copied(moved)
        try:
            _refuse_host_reads(module, moved)
            with packing.in_place():  # the same kernels on both sides: integers that follow from near-ties agree too
                replay = Graph(module, inputs, pool) if inputs[0].is_cuda else Trace(module, inputs)
                same = all(_agrees(replay, module, at, stored) for at in (moved, inputs))
            same = same and _agrees_unpacked(replay(*inputs), module, inputs)
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


def _written(module: nn.Module) -> tuple[Tensor, ...]:
    return getattr(module, "written", ())


def _done(call: Pass, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a call returns, and what is written by then: traces may drop writes. Of caches that are as large as the
    model, where a module can tell (`written_at`), what a call at these inputs writes."""
    found, tell = _copied(call(*inputs)), getattr(module, "written_at", None)
    return (*found, *(_copied(_written(module)) if tell is None else tell(*inputs)))


def _copied(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Ordinary tensors: those made in inference mode cannot be captured."""
    return tuple(one.clone() for one in inputs)


def _agrees(replay: Pass, module: nn.Module, inputs: tuple[Tensor, ...], stored: Callable[[], list[Tensor]]) -> bool:
    """Whether it gives and writes what the module does."""
    if not inputs[0].is_cuda:
        return alike(_done(replay, module, inputs), _done(module, module, inputs))

    def done(call: Pass) -> tuple[Tensor, ...]:
        return (*_done(call, module, inputs), *map(shadow, stored()))

    have, want = done(replay), done(module)
    dtype = precision_of(module, want)

    def otherwise() -> tuple[Tensor, ...]:
        with the_other_way(dtype):
            return done(module)

    return alike_but_for_near_ties(have, want, otherwise, dtype)


def _agrees_unpacked(have: tuple[Tensor, ...], module: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    """Whether packed weights give what the model's own give, as far as numbers tell: a token drawn inside a unit may
    rightly be another one."""
    if inputs[0].is_cuda or not all(one.is_floating_point() for one in have):
        return True
    return all(near(one, other) for one, other in zip(have, module(*inputs), strict=True))


WARM_UP = 3  # calls: the first ones specialise the graph to the shapes
NODE_BYTES = 4200  # measured: 14 MB for the 3,350 nodes of an 8-layer model, as traced and as specialised


class Trace:
    """A TorchScript graph of `module` at inputs of these shapes, over the weights that it has while this is made.

    `torch.jit.trace` enters the classes and graphs of all it traces in a table of the process that nothing is ever
    taken out of, and with them the caches that their constants refer to: 43 MB a call where batch sizes took turns. So
    the graph is made here without modules, their weights being inputs, and compiled into a table of its own that ends
    with it.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        count = len(inputs)

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            return module(*given[:count])

        # packed weights cannot be written into a graph as constants, and writes to constants are dropped as useless
        # where nothing in the graph reads them afterwards
        self.weights = tuple(dict.fromkeys((*module.parameters(), *module.buffers(), *_written(module))))
        graph, _ = torch._C._create_graph_by_tracing(run, (*inputs, *self.weights), _unnamed, True, False)
        _know_sizes(graph)
        self.num_bytes = NODE_BYTES * _forget_lines(graph)
        """Of the graph, about; weights and caches are others'."""
        self._call: Callable[..., tuple[Tensor, ...] | Tensor] = torch._C._create_function_from_graph("forward", graph)
        for _ in range(WARM_UP):
            self(*inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the module returns."""
        found = self._call(*inputs, *self.weights)
        return found if isinstance(found, tuple) else (found,)


def _know_sizes(graph: Any) -> None:
    """Sizes become constants, with what is computed from them, and what is computed twice is computed once: a graph
    serves one shape alone, and the arithmetic of shapes took a tenth of a pass over one token."""
    for node in list(graph.findAllNodes("aten::size")):
        tensor, dimension = node.inputs()
        sizes = tensor.type().sizes()
        if sizes is not None:
            with graph.insert_point_guard(node):
                node.output().replaceAllUsesWith(graph.insertConstant(sizes[dimension.toIValue()]))
    torch._C._jit_pass_constant_propagation(graph)
    for node in graph.findAllNodes("aten::slice"):  # every slice [:], which indexing makes of each axis it leaves alone
        tensor, sliced = next(node.inputs()), node.output()
        if tensor.type().sizes() is not None and tensor.type().sizes() == sliced.type().sizes():
            sliced.replaceAllUsesWith(tensor)
    torch._C._jit_pass_cse(graph)
    torch._C._jit_pass_dce(graph)


def _forget_lines(graph: torch._C.Graph) -> int:
    """The number of nodes, which no longer hold the Python stack they come from: 40 % of a graph's memory."""
    nodes, blank = list(graph.nodes()), graph.create("prim::Constant", [], 1)
    for node in nodes:
        node.copyMetadata(blank)
    return len(nodes)


def _unnamed(tensor: Tensor) -> str:
    return ""


WARM_UP = 3  # calls before recording, in which libraries choose their kernels


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device, as a pool's memory belongs to its stream: torch's own lies on the device that captured
    first, and on another device nothing would be recorded."""
    return torch.cuda.Stream(device)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """A graph that is freed while another is captured ends that capture, and old graphs lie in cycles that the garbage
    collector frees whenever it runs; since torch 2.9 `torch.cuda.graph` no longer collects before it begins."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
            own = _capture_stream(inputs[0].device)
            with (
                torch.cuda.stream(torch.cuda.current_stream()),  # comes back to it also where the capture fails
                _nothing_collected(),
                torch.cuda.graph(self.graph, pool=pool, stream=own, capture_error_mode="thread_local"),
            ):
                self.results = module(*inputs)

    def _warm_up(self) -> None:
        side = _capture_stream(self.inputs[0].device)  # cuBLAS keeps 32 MB for every stream that it has seen
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
