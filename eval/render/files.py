"""What every mode leaves in its folder."""

from __future__ import annotations

from typing import Any

from decode.common.run_folder import RunFolder
from eval.results.schema import write_results


def write_files(folder: RunFolder, results: dict[str, Any], summary: str, page: str) -> None:
    """results.json, checked against its schema, summary.md and index.html."""
    write_results(folder.file("results.json"), results)
    folder.file("summary.md").write_text(summary, encoding="utf-8")
    folder.file("index.html").write_text(page, encoding="utf-8")
