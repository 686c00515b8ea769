"""The cells of the suite, each written when it is done, so that a run that was killed goes on where it stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decode.house.run_folder import RunFolder, read_json, write_json
from eval.config import EvalConfig


@dataclass(frozen=True)
class Point:
    """Settings are chosen once per batch size and temperature, on both kinds of text."""

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


def points(cfg: EvalConfig) -> list[Point]:
    """Batch size outermost: passes captured and compiled for its shapes serve all of its cells."""
    return [Point(rows, temperature) for rows in cfg.decoders.batch_sizes for temperature in cfg.temperatures]


def cells(cfg: EvalConfig) -> list[Cell]:
    """All cells in the order of the run."""
    return [Cell(one.batch_size, one.temperature, text) for one in points(cfg) for text in cfg.decoders.texts]


@dataclass(frozen=True)
class Results:
    """What is already measured, in the run folder: `cells/NAME.json` and `choices/NAME.json`."""

    folder: RunFolder

    def choice(self, point: Point) -> dict[str, Any] | None:
        """What was chosen there, or None."""
        return self._read(f"choices/{point.name}.json")

    def keep_choice(self, point: Point, choice: dict[str, Any]) -> None:
        """Write it whole or not at all."""
        write_json(self.folder.file(f"choices/{point.name}.json"), choice)

    def cell(self, cell: Cell) -> dict[str, Any] | None:
        """What was measured there, or None."""
        return self._read(f"cells/{cell.name}.json")

    def keep_cell(self, cell: Cell, content: dict[str, Any]) -> None:
        """Write it whole or not at all."""
        write_json(self.folder.file(f"cells/{cell.name}.json"), content)

    def missing(self, every: Sequence[Cell]) -> Iterator[Cell]:
        """Cells still to be measured."""
        return (cell for cell in every if self.cell(cell) is None)

    def _read(self, name: str) -> dict[str, Any] | None:
        file = self.folder.path / name
        return read_json(file) if file.is_file() else None
