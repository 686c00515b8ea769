"""A thread beside the caller's, which does one thing at a time, on a GPU in streams of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Aside:
    """Made for the devices that its work is on; the thread is there from the first work to `end`."""

    def __init__(self, *devices: torch.device) -> None:
        self._pool = ThreadPoolExecutor(1, "draft-ahead")
        self._streams = [torch.cuda.Stream(one) for one in set(devices) if one.type == "cuda"]

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Do it beside what the caller does next: it finds what the caller's streams hold by now, and the caller's
        context variables. Nothing may be begun before `result` was asked for the work before it."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return self._pool.submit(copy_context().run, self._done, work, _precisions())

    def _done(self, work: Callable[[], T], precisions: Mapping[str, torch.dtype]) -> T:
        with torch.inference_mode(), ExitStack() as stack:  # modes are a thread's own
            for device, dtype in precisions.items():
                stack.enter_context(torch.autocast(device, dtype))
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            return work()

    def result(self, begun: Future[T]) -> T:
        """Wait for it, and raise what it raised. The caller's streams go on behind it."""
        try:
            return begun.result()
        finally:
            self._join()

    def end(self) -> None:
        """Wait for what is under way, and end the thread. Caches that it wrote into are the caller's streams' again."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._join()

    def _join(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)


def _precisions() -> dict[str, torch.dtype]:
    """Device type -> what this thread's autocast computes in there; none where it is off."""
    return {one: torch.get_autocast_dtype(one) for one in ("cpu", "cuda") if torch.is_autocast_enabled(one)}


def handed_over(tensor: Tensor) -> Tensor:
    """A tensor of another stream, whose memory is not given away while the caller's stream reads it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor
