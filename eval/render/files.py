"""What every mode leaves in its folder; a finished report also as an artifact of a tracker, beside the curves that
training left there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from decode.common.run_folder import RunFolder
from eval.config import EvalConfig
from eval.render.formatting import named
from eval.render.page import Page
from eval.results.reported import Report
from eval.results.schema import write_results
from train.trackers import build_tracker, check_tracker

FILES = ("results.json", "summary.md", "index.html")


def write_files(folder: RunFolder, page: Page) -> None:
    """results.json, checked against its schema, summary.md and index.html."""
    write_results(folder.file("results.json"), page.results)
    folder.file("summary.md").write_text(page.markdown(), encoding="utf-8")
    folder.file("index.html").write_text(page.html(), encoding="utf-8")


def check_tracking(cfg: EvalConfig) -> None:
    """ConfigError where the tracker cannot work here."""
    check_tracker(cast(Any, cfg))


def track_report(cfg: EvalConfig, folder: Path, results: dict[str, Any]) -> None:
    """Log the report's files and the figures of its rows; nothing for the tracker `jsonl`."""
    fingerprint = hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]
    tracker = build_tracker(cast(Any, cfg), folder, fingerprint, is_main=True)
    figures = {
        f"{named(row)}/T={row.temperature:g}/{name}": getattr(row, name)
        for row in Report.model_validate(results).rows
        if row.category is None
        for name in ("alpha", "tau", "speedup", "predicted_speedup", "realised", "mismatches")
        if getattr(row, name) is not None
    }
    tracker.finish([folder / name for name in FILES], figures)
