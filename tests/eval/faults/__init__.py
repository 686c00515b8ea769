"""Faults of measuring that a programmer might make: ratios upside down, other prompts, other units, other averages."""

from __future__ import annotations

from tests.eval.faults import (
    energy,
    figures,
    named_faults,
    pooling,
    prompts,
    quality,
    rows,
    schedules,
    times,
    ways_to_draft,
)
from tests.faults import Fault

FAULTS: list[Fault] = [
    one
    for part in (energy, figures, rows, times, prompts, quality, pooling, schedules, named_faults, ways_to_draft)
    for one in part.FAULTS
]
