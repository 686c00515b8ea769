"""Faults of the folder train/, and the small test that notices each."""

from __future__ import annotations

from typing import Any

from tests.faults import Fault
from tests.train.faults_of_drafts import KEEPING, SHAPES
from tests.train.faults_of_steps import LOOP, NUMBERS, OPTIMIZERS, READING


def faults(noticed: dict[Any, str]) -> list[Fault]:
    """Of lines `FILE:FUNCTION: text in it => what stands there instead`, by the test that notices them."""
    found = []
    for test, lines in noticed.items():
        for line in lines.strip().splitlines():
            where, _, change = line.strip().partition(": ")
            old, _, new = change.partition(" => ")
            found.append(Fault(where if where.startswith("decode.") else f"train.{where}", old, new, test))
    return found


FAULTS: list[Fault] = [
    fault for noticed in (LOOP, READING, NUMBERS, OPTIMIZERS, KEEPING, SHAPES) for fault in faults(noticed)
]
