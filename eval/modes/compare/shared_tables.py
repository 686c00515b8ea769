"""Tables and columns that the pages of all comparisons have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from eval.render.formatting import MISSING, Column, Table, columns, number, spread, with_interval
from eval.results.compared import Choice, Comparison, Held, Ratio


class Tried(NamedTuple):
    """What was chosen for an arm, or a family of arms, at one place."""

    batch_size: int
    temperature: float
    text: str | None
    arm: str
    chosen: str
    tried: str
    held: Held | None


def choice_table(
    choices: Sequence[Choice],
    shown: Sequence[str | Column],
    note: str,
    title: str = "Settings tried",
    write: Callable[[Mapping[str, float | None]], str] | None = None,
) -> Table:
    """Every setting tried, on prompts that are not reported; the fastest of each arm first."""
    rows = [
        Tried(one.batch_size, one.temperature, one.text, arm, one.best[arm], (write or _ranked)(speeds), one.held)
        for one in choices
        for arm, speeds in one.tokens_per_s.items()
    ]
    return Table(title, columns(*shown), rows, note, is_detail=True)


def _ranked(speeds: Mapping[str, float | None]) -> str:
    ranked = sorted(speeds.items(), key=lambda one: -(one[1] or 0.0))
    return ", ".join(f"{name} {number(speed, 0)}" for name, speed in ranked)


def ratio_columns(found: Comparison, header: str, ratio_of: Callable[[Any], Ratio]) -> list[Column]:
    """A ratio with its interval, and of several runs the least and the most."""

    def shown(row: Any) -> str:
        ratio = ratio_of(row)
        return with_interval(ratio.value, ratio.ci95)

    return [Column(header, shown), *by_run(found, lambda row: ratio_of(row).by_run)]


def by_run(found: Comparison, values_of: Callable[[Any], Sequence[float | None]]) -> list[Column]:
    """The least and the most of several runs; nothing of one."""
    return [Column("by run", lambda row: spread(values_of(row), 2))] if found.runs else []


def in_words(changes: Mapping[str, Any], nothing: str = MISSING) -> str:
    """KEY=VALUE of each."""
    return ", ".join(f"{key}={value}" for key, value in changes.items()) or nothing
