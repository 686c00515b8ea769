"""Operators behind a phase's time, from torch.profiler: products, attention, cache writes, the rest, and Python."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable

from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from decode.stats import PHASES

CLASSES = ("matmul", "attention", "cache writes", "elementwise", "Python gap")
_NAMES = (
    ("attention", re.compile(r"scaled_dot_product|softmax|flash|fmha|bmm|attention", re.IGNORECASE)),
    ("cache writes", re.compile(r"index_put|index_copy|scatter|index_fill", re.IGNORECASE)),
    ("matmul", re.compile(r"(add)?mm\b|linear|matmul|gemm|gemv|cutlass|cublas|nvjet|xmma", re.IGNORECASE)),
)
_OPERATORS = ("aten::", "mkldnn::", "onednn::", "prims::")


def class_of(name: str) -> str:
    """The class of an operator or kernel by its name; batched products and softmax are attention's in a decoder, and
    what fits no pattern is elementwise (norms, activations, copies, argmax)."""
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), "elementwise")


def profiled(call: Callable[[], object], on_cuda: bool) -> dict[str, dict[str, float]]:
    """Seconds by phase and class in one call: of operators on a CPU, of kernels on a GPU."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch 2.13 writes a line at each start and stop
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        call()
    events: Iterable[FunctionEvent] = profiler.events() or []
    return _by_kernel(list(events)) if on_cuda else _by_operator(events)


def _by_operator(events: Iterable[FunctionEvent]) -> dict[str, dict[str, float]]:
    """Each operator's own time goes to the phase that it was called in."""
    found: dict[str, dict[str, float]] = {phase: defaultdict(float) for phase in PHASES}
    for event in events:
        phase = _phase_of(event)
        if phase is not None and event.name.startswith(_OPERATORS):
            found[phase][class_of(event.name)] += event.self_cpu_time_total / 1e6
    return {phase: dict(classes) for phase, classes in found.items()}


def _phase_of(event: FunctionEvent) -> str | None:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name in PHASES:
            return parent.name
        parent = parent.cpu_parent
    return None


def _by_kernel(events: list[FunctionEvent]) -> dict[str, dict[str, float]]:
    """Kernels lie on the device's own clock, inside the mark that their phase leaves there."""
    found: dict[str, dict[str, float]] = {phase: defaultdict(float) for phase in PHASES}
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    marks = [(event.time_range.start, event.time_range.end, event.name) for event in on_device if event.name in PHASES]
    for event in on_device:
        if event.name in PHASES:
            continue
        middle = (event.time_range.start + event.time_range.end) / 2
        phase = next((name for start, end, name in marks if start <= middle <= end), None)
        if phase is not None:
            found[phase][class_of(event.name)] += event.time_range.elapsed_us() / 1e6
    return {phase: dict(classes) for phase, classes in found.items()}
