"""The finished report as an artifact of a tracker, beside the curves that training left there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from eval.config import EvalConfig
from eval.render.formatting import named
from train.trackers import build_tracker, check_tracker

FILES = ("results.json", "summary.md", "index.html")


def check_tracking(cfg: EvalConfig) -> None:
    """ConfigError where the tracker cannot work here."""
    check_tracker(cast(Any, cfg))


def track_report(cfg: EvalConfig, folder: Path, results: dict[str, Any]) -> None:
    """Log the report's files and the figures of its rows; nothing for the tracker `jsonl`."""
    fingerprint = hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]
    tracker = build_tracker(cast(Any, cfg), folder, fingerprint, is_main=True)
    tracker.finish([folder / name for name in FILES], _figures(results["rows"]))


def _figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"{named(row)}/T={row['temperature']:g}/{name}": row[name]
        for row in rows
        if row["category"] is None
        for name in ("alpha", "tau", "speedup", "predicted_speedup", "realised", "mismatches")
        if row[name] is not None
    }
