"""Work in a process of its own: what a trainer leaves behind (deterministic kernels, memory) must not be timed."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any, TypeVar

from decode.common.errors import RunError

T = TypeVar("T")


def in_child(call: Callable[..., T], *arguments: Any) -> T:
    """call(*arguments) in a fresh interpreter that ends with this one, even where this one is killed.

    `call` is a function of a module. What it raises is raised here; RunError where the process dies.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            return pool.submit(call, *arguments).result()
        except BrokenProcessPool as error:
            raise RunError(
                "the process that trains died, most often for want of memory; what it finished is kept, so go on with "
                "resume=auto"
            ) from error


def _end_with_parent() -> None:
    """Two suites must never train into one folder: the orphan of a killed run would."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by in_child"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
