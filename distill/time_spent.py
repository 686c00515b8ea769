"""Where the time of a run went: starting what runs the target, writing responses, reading texts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from decode.common.checked_json import Amount, Content

Part = Literal["starting", "writing", "reading"]


class TimeSpent(Content):
    """Seconds of the process that finished the run, of several the first one's; what a killed run took is in none."""

    starting: Amount = 0.0
    """Loading the target here, or starting its engines."""
    writing: Amount = 0.0
    """Of responses by the target, or of texts from a corpus."""
    reading: Amount = 0.0
    """Of finished texts by the target, for p and hidden states, and of their way to the disk."""


class Stopwatch:
    """Adds up the seconds of each part; a part that begins within another one counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[Part, float] = {"starting": 0.0, "writing": 0.0, "reading": 0.0}

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """What the block takes, less the parts within it."""
        began, counted = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            within = sum(self.seconds.values()) - counted
            self.seconds[name] += max(0.0, time.perf_counter() - began - within)

    def told(self) -> dict[str, float]:
        """As the manifest has it."""
        return TimeSpent(**{name: round(each, 3) for name, each in self.seconds.items()}).model_dump()
