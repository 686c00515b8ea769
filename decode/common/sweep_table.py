"""The table that compares the jobs of a sweep: what was swept, what each job's manifest says, and where it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.common.checked_json import read_json
from decode.common.markdown import plain
from decode.common.run_folder import MANIFEST

RESUMED = (
    "+ behind seconds: the job went on after an interruption, and what it had taken until then is not counted. "
    "Delete its folder, and run the sweep again, to have it timed whole."
)


@dataclass(frozen=True)
class Figures:
    """What the jobs of a stage are compared by."""

    columns: dict[str, str]
    """Column -> its place in manifest.json, such as counts.tokens."""
    highest: str | None = None
    """The column by which jobs are ranked, the highest value first; None leaves them in their order."""
    lowest: str | None = None
    """The column that ranks those without the other: lowest value first."""


@dataclass(frozen=True)
class Row:
    """One job."""

    swept: dict[str, str]
    folder: Path
    status: str

    @property
    def failed(self) -> bool:
        """Whether its folder holds no result of it."""
        return self.status.startswith("failed")


def comparison(rows: Sequence[Row], figures: Figures) -> str:
    """The jobs as a Markdown table, best first where `figures` say what is best.

    Everything but the status is read from the jobs' folders, so a table made after an interruption is the whole one.
    """
    ranked = sorted(((row, *_measured(row, figures)) for row in rows), key=lambda one: _rank(one[1], figures))
    swept = list(dict.fromkeys(key for row in rows for key in row.swept))
    table = [[*swept, *figures.columns, "seconds", "folder", "status"]]
    for row, found, seconds in ranked:
        values = [row.swept.get(key, "-") for key in swept]
        table.append([*values, *map(_number, found.values()), seconds, str(row.folder), row.status])
    notes = [RESUMED] if any(seconds.endswith("+") for _, _, seconds in ranked) else []
    return "\n\n".join([_aligned(table), *notes])


def _measured(row: Row, figures: Figures) -> tuple[dict[str, Any], str]:
    """Column -> figure, None for one that the job does not have; and the seconds it took, as they are shown."""
    file = row.folder / "manifest.json"
    if row.failed or not file.is_file():  # a folder that was in the way may hold the manifest of another run
        return dict.fromkeys(figures.columns), "-"
    ended, content = MANIFEST.read(file), read_json(file)
    seconds = "-" if ended.seconds is None else f"{ended.seconds:,.1f}{'+' * ended.resumed}"
    return {column: _at(content, place) for column, place in figures.columns.items()}, seconds


def _at(content: Any, place: str) -> Any:
    for key in place.split("."):
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _rank(found: dict[str, Any], figures: Figures) -> tuple:
    """Ranks by the first figure that there is; jobs without any come last, equal ones stay in order."""
    if figures.highest is None:
        return ()
    for place, (column, sign) in enumerate(((figures.highest, -1), (figures.lowest, 1))):
        value = found[column] if column is not None else None
        if isinstance(value, int | float) and not math.isnan(value):
            return place, sign * value
    return 2, 0


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _aligned(rows: list[list[str]]) -> str:
    """Markdown that can be read as it is."""
    texts = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    texts.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in texts
    )
