"""The training curves of the drafts, read from the metrics their runs left beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from decode.common.checked_json import Content, Count, JsonFile, Text

METRICS = "metrics.jsonl"


class Line(Content):
    """An event, with whatever was measured then."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[float, Field(allow_inf_nan=True)] | int | Text | None]

    kind: Text
    step: Count


LINE = JsonFile(
    Line,
    "the curve and the pace of the training would be another's",
    "The run's log is damaged: copy it again, or train again.",
)
Curves = dict[str, list[dict[str, Any]]]
"""draft -> lines of its metrics.jsonl."""


def training_curves(drafts: Mapping[str, str]) -> Curves:
    """Metrics of the drafts whose run folder holds any: the folder itself, or the one that `model/` lies in."""
    curves: Curves = {}
    for name, path in drafts.items():
        file = next((f / METRICS for f in (Path(path), Path(path).parent) if (f / METRICS).is_file()), None)
        if file is not None:
            curves[name] = read_metrics(file)
    return curves


def series(lines: list[dict[str, Any]], kind: str, field: str) -> tuple[list[float], list[float]]:
    """Steps and values of one field in the lines of one kind."""
    points = [(line["step"], line[field]) for line in lines if line.get("kind") == kind and line.get(field) is not None]
    return [step for step, _ in points], [value for _, value in points]


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; InputError names a damaged one."""
    lines = enumerate(file.read_bytes().splitlines(), start=1)
    return [LINE.parse(line, f"{file}:{number}").model_dump() for number, line in lines]
