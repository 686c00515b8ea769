"""The cells of the suite, in the order of the run."""

from __future__ import annotations

from eval.config import EvalConfig
from eval.measure.cells import Cell, Point


def points(cfg: EvalConfig) -> list[Point]:
    """Batch size outermost: passes captured and compiled for its shapes serve all of its cells."""
    return [Point(rows, temperature) for rows in cfg.decoders.batch_sizes for temperature in cfg.temperatures]


def cells(cfg: EvalConfig) -> list[Cell]:
    """All cells in the order of the run."""
    return [Cell(one.batch_size, one.temperature, text) for one in points(cfg) for text in cfg.decoders.texts]
