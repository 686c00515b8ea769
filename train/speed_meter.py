"""How fast training goes: tokens per second, time to the end, and the share of time spent waiting for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Meter:
    """Rates since the last reading; the ETA is over everything, validations included."""

    def __init__(self, steps: int, first_step: int) -> None:
        self.steps, self.first_step = steps, first_step
        self.started = self.since = time.perf_counter()
        self.tokens = 0.0
        self.wait_s = 0.0

    def add(self, tokens: float) -> None:
        """Tokens of one step, all ranks together."""
        self.tokens += tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time that does not count as training."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def read(self, step: int, wait_s: float) -> dict[str, float]:
        """Rates since the last reading at step `step`; `wait_s` is the seconds waited for data so far, all in all."""
        now = time.perf_counter()
        elapsed = max(now - self.since, 1e-9)
        per_step = (now - self.started) / max(1, step - self.first_step)
        rates = {
            "tokens_per_s": self.tokens / elapsed,
            "eta_s": per_step * (self.steps - step),
            "data_wait_share": (wait_s - self.wait_s) / elapsed,
        }
        self.since, self.tokens, self.wait_s = now, 0.0, wait_s
        return rates
