"""Estimates over prompts with paired bootstrap intervals (Efron 1979, percentile form), and ratios of arms' speeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def described(name: str, estimate: Estimate | None) -> dict[str, Any]:
    """NAME and NAME_ci95 as JSON has them; None where nothing could be estimated."""
    return {name: estimate and estimate.value, f"{name}_ci95": estimate and estimate.interval}


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
    from scipy import stats  # up to a second, which a plan or a wrong setting would wait for

    found = stats.bootstrap(
        tuple(columns.T),
        lambda *drawn, axis: statistic(np.stack(drawn, axis=-1)),
        n_resamples=resamples,
        batch=max(1, _CHUNK_ELEMENTS // columns.size),
        vectorized=True,
        paired=True,
        confidence_level=0.95,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(float(statistic(columns[None])[0]), (float(found.low), float(found.high)))


def bootstrap_crossed(columns: np.ndarray, statistic: Statistic, seed: int, resamples: int = 2_000) -> Estimate:
    """`statistic` of (s, n, c) `columns`, s trainings on the same n prompts, with an interval over both: in every
    resample trainings and prompts are drawn with replacement, each on their own, and what they have in common is kept.

    With three trainings the share of training noise in the interval is rough, but it is not left out.
    """
    columns = np.asarray(columns, dtype=float)
    assert columns.ndim == 3, "one row per training and prompt"
    trainings, prompts, width = columns.shape
    value = float(statistic(columns.reshape(1, -1, width))[0])
    if trainings * prompts == 1:
        return Estimate(value, None)
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, count, (resamples, count)) for count in (trainings, prompts)]
    step = max(1, _CHUNK_ELEMENTS // columns.size)
    found = []
    for start in range(0, resamples, step):
        rows, places = (one[start : start + step] for one in drawn)
        resampled = columns[rows[:, :, None], places[:, None]]
        found.append(statistic(resampled.reshape(len(rows), -1, width)))
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975])
    return Estimate(value, (float(low), float(high)))


def ratio_of_ratios(columns: np.ndarray) -> np.ndarray:  # (R, n, 4) -> (R,)
    """ratio_of_sums of the first two columns over that of the other two, paired by row."""
    return ratio_of_sums(columns[..., :2]) / ratio_of_sums(columns[..., 2:])


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


def arm_seconds(cell: Mapping[str, Any], arm: str) -> np.ndarray | None:  # (groups,)
    """Decode seconds per token of an arm by batch of prompts, NaN where unknown; None where it did not run."""
    for one in cell["arms"]:
        if one["arm"] == arm:
            return np.array([np.nan if value is None else value for value in one["seconds_per_token"]])
    return None


def arm_speed(cells: Iterable[Mapping[str, Any]], arm: str) -> float | None:
    """Median over all batches of prompts of the cells."""
    known = [values for cell in cells if (values := arm_seconds(cell, arm)) is not None]
    each = 1 / np.concatenate(known) if known else np.array([])
    return float(np.nanmedian(each)) if np.isfinite(each).any() else None


def arm_ratio(cells: Iterable[Mapping[str, Any]], ours: str, other: str, seed: int) -> Estimate | None:
    """How many times as fast as `other` our arm is, over all batches of prompts of the cells where both ran."""
    both = arm_pairs(cells, ours, other)
    both = both[np.isfinite(both).all(1)]
    return bootstrap(both, median_of_ratios, seed) if len(both) else None


def arm_ratio_of_runs(cells: Sequence[Mapping[str, Any]], ours: str, other: str, seed: int) -> Estimate | None:
    """The same over several runs of one cell, the same batches in each: those that every run could time, with an
    interval over runs and batches."""
    pairs = [arm_pairs([cell], ours, other) for cell in cells]
    both = np.stack(pairs) if len({len(one) for one in pairs}) == 1 else np.zeros((0, 0, 2))
    known = both[:, np.isfinite(both).all((0, 2))]
    return bootstrap_crossed(known, median_of_ratios, seed) if known.size else None


def ratio_over(runs: Sequence[Mapping[str, Any]], arm: str, other: str, seed: int) -> Estimate | None:
    """How many times as fast an arm is; over runs and batches where there are several runs."""
    return arm_ratio(runs, arm, other, seed) if len(runs) == 1 else arm_ratio_of_runs(runs, arm, other, seed)


def arm_pairs(cells: Iterable[Mapping[str, Any]], ours: str, other: str) -> np.ndarray:  # (n, 2)
    """Seconds per token of `other` and of our arm by batch of prompts of the cells where both ran; NaN where
    unknown."""
    columns = [np.zeros((0, 2))]
    for cell in cells:
        theirs, mine = arm_seconds(cell, other), arm_seconds(cell, ours)
        if theirs is not None and mine is not None:
            columns.append(np.stack([theirs, mine], axis=1))
    return np.concatenate(columns)


def fastest_arm(cells: Sequence[Mapping[str, Any]], arms: Iterable[str]) -> str | None:
    """The arm with the highest median speed over the cells; None where none of them ran."""
    speeds = {arm: speed for arm in arms if (speed := arm_speed(cells, arm)) is not None}
    return max(speeds, key=lambda arm: speeds[arm]) if speeds else None
