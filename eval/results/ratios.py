"""Speeds of arms as results.json keeps them, and their ratios: paired by batch, median, bootstrap interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from eval.results.statistics import Estimate, bootstrap, median_of_ratios


def seconds(cell: Mapping[str, Any], arm: str) -> np.ndarray | None:  # (groups,)
    """Decode seconds per token of an arm by batch of prompts, NaN where unknown; None where it did not run."""
    for one in cell["arms"]:
        if one["arm"] == arm:
            return np.array([np.nan if value is None else value for value in one["seconds_per_token"]])
    return None


def tokens_per_s(cells: Iterable[Mapping[str, Any]], arm: str) -> float | None:
    """Median over all batches of prompts of the cells."""
    known = [values for cell in cells if (values := seconds(cell, arm)) is not None]
    each = 1 / np.concatenate(known) if known else np.array([])
    return float(np.nanmedian(each)) if np.isfinite(each).any() else None


def ratio(cells: Iterable[Mapping[str, Any]], ours: str, other: str, seed: int) -> Estimate | None:
    """How many times as fast as `other` our arm is, over all batches of prompts of the cells where both ran."""
    columns = []
    for cell in cells:
        theirs, mine = seconds(cell, other), seconds(cell, ours)
        if theirs is not None and mine is not None:
            columns.append(np.stack([theirs, mine], axis=1))
    if not columns:
        return None
    both = np.concatenate(columns)
    both = both[np.isfinite(both).all(1)]
    return bootstrap(both, median_of_ratios, seed) if len(both) else None


def faster(cells: list[dict[str, Any]], arms: Iterable[str]) -> str | None:
    """The arm with the highest median speed over the cells; None where none of them ran."""
    speeds = {arm: speed for arm in arms if (speed := tokens_per_s(cells, arm)) is not None}
    return max(speeds, key=lambda arm: speeds[arm]) if speeds else None
