"""The training curves of the drafts, read from the metrics their runs left beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode.house.errors import InputError

METRICS = "metrics.jsonl"

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
    lines = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InputError(
                f"{file}:{number}: not JSON ({error}); the run's log is damaged, so no curve is drawn"
            ) from error
    return lines
