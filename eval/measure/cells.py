"""Cells of a suite: interleaved runs whose results are kept as soon as they are done, so that a killed run goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from decode.common.run_folder import RunFolder
from decode.common.sealed import read_sealed, write_sealed
from eval.measure.timed_run import Samples, call_seconds_per_token, seconds_per_token


@dataclass(frozen=True)
class Point:
    """Settings are chosen once per batch size and temperature, on all kinds of text together."""

    batch_size: int
    temperature: float

    @property
    def name(self) -> str:
        """For files and messages."""
        return f"batch{self.batch_size}-T{self.temperature:g}"


@dataclass(frozen=True)
class Cell:
    """One interleaved run: all arms on the same prompts."""

    batch_size: int
    temperature: float
    text: str

    @property
    def point(self) -> Point:
        """Where its settings were chosen."""
        return Point(self.batch_size, self.temperature)

    @property
    def name(self) -> str:
        """For files and messages."""
        return f"{self.point.name}-{self.text}"

    def as_dict(self) -> dict[str, Any]:
        """For results.json."""
        return asdict(self)


@dataclass(frozen=True)
class Results:
    """What is already measured, in the run folder: `cells/NAME.json` and `choices/NAME.json`."""

    folder: RunFolder

    def choice(self, point: Point) -> dict[str, Any] | None:
        """What was chosen there, or None."""
        return self.read(f"choices/{point.name}.json")

    def keep_choice(self, point: Point, choice: dict[str, Any]) -> None:
        """Write it whole or not at all."""
        self.keep(f"choices/{point.name}.json", choice)

    def cell(self, cell: Cell) -> dict[str, Any] | None:
        """What was measured there, or None."""
        return self.read(f"cells/{cell.name}.json")

    def keep_cell(self, cell: Cell, content: dict[str, Any]) -> None:
        """Write it whole or not at all."""
        self.keep(f"cells/{cell.name}.json", content)

    def missing(self, every: Iterable[Cell]) -> Iterator[Cell]:
        """Cells still to be measured."""
        return (cell for cell in every if self.cell(cell) is None)

    def read(self, name: str) -> dict[str, Any] | None:
        """A file of the folder, or None; InputError where it was changed since."""
        file = self.folder.path / name
        return read_sealed(file) if file.is_file() else None

    def keep(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of the folder whole or not at all."""
        write_sealed(self.folder.file(name), content)


def arm_times(name: str, samples: Samples) -> dict[str, Any]:
    """An arm's times by batch of prompts, so that ratios can be paired afterwards."""
    return {
        "arm": name,
        "seconds_per_token": _numbers(seconds_per_token(samples[name])),
        "call_seconds_per_token": _numbers(call_seconds_per_token(samples[name])),
        "tokens": sum(sample.tokens for group in samples[name] for sample in group),
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
