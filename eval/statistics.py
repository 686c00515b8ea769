"""Estimates over prompts with paired bootstrap intervals (Efron 1979, percentile form), and the few counts beside
them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Statistic = Callable[[np.ndarray], np.ndarray]  # (resamples, n, columns) -> (resamples,)
_CHUNK_ELEMENTS = 4_000_000


@dataclass(frozen=True)
class Estimate:
    """A value over prompts and its 95% interval."""

    value: float
    ci95: tuple[float, float] | None
    """None where there is one prompt only, which says nothing of others."""

    @property
    def interval(self) -> list[float] | None:
        """`ci95` as JSON has it."""
        return None if self.ci95 is None else list(self.ci95)


def ratio_of_sums(columns: np.ndarray) -> np.ndarray:  # (R, n, 2) -> (R,)
    """Sum of the first column over sum of the second: a mean over tokens, not over prompts."""
    sums = columns.sum(-2)
    return sums[..., 0] / sums[..., 1]


def median_of_ratios(columns: np.ndarray) -> np.ndarray:  # (R, n, 2) -> (R,)
    """Median over prompts of first column / second column, paired within the prompt."""
    return np.median(columns[..., 0] / columns[..., 1], axis=-1)


def bootstrap(columns: np.ndarray, statistic: Statistic, seed: int, resamples: int = 10_000) -> Estimate:
    """`statistic` of (n, c) `columns`, one row per prompt, with the 2.5% and 97.5% points over resampled prompts.

    Rows are drawn with replacement and whole, so whatever was measured on one prompt stays paired.
    """
    columns = np.asarray(columns, dtype=float)
    assert columns.ndim == 2, "one row per prompt, one column per quantity"
    if not len(columns):
        raise ValueError("no prompts to resample")
    if len(columns) == 1:
        return Estimate(float(statistic(columns[None])[0]), None)
    rng = np.random.default_rng(seed)
    step = max(1, _CHUNK_ELEMENTS // columns.size)
    parts = []
    for start in range(0, resamples, step):
        rows = rng.integers(0, len(columns), size=(min(step, resamples - start), len(columns)))
        parts.append(statistic(columns[rows]))
    low, high = np.quantile(np.concatenate(parts), [0.025, 0.975])
    return Estimate(float(statistic(columns[None])[0]), (float(low), float(high)))


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50 and p95; None where nothing was observed."""
    if not values:
        return {"p50": None, "p95": None}
    return {"p50": float(np.quantile(values, 0.5)), "p95": float(np.quantile(values, 0.95))}


def inter_arrivals(arrivals: Sequence[float]) -> list[float]:
    """Seconds between consecutive arrivals; tokens that came in one burst share one arrival."""
    return [later - earlier for earlier, later in zip(arrivals, arrivals[1:], strict=False)]


def repeated_4grams(tokens: Sequence[int]) -> tuple[int, int]:
    """(4-grams that occurred before in the same text, all 4-grams)."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(grams) - len(set(grams)), len(grams)


def share(part: int, whole: int) -> float | None:
    """part / whole; None of nothing."""
    return part / whole if whole else None


def finite(value: float | None) -> float | None:
    """`value`, or None where it is not a number (JSON has no NaN)."""
    return value if value is not None and math.isfinite(value) else None
