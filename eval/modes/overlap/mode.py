"""`mode=overlap`: simulate drafting ahead beside drafting in turn, and write a page. No model is loaded."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from decode.common.progress import get_logger
from decode.common.run_folder import open_run
from eval.config import EvalConfig
from eval.modes.overlap.page import render_page, render_summary
from eval.modes.overlap.pairs import Pair, pairs
from eval.modes.overlap.results import make_results
from eval.modes.overlap.simulation import WAYS
from eval.render.files import write_files
from eval.render.formatting import count

log = get_logger("eval")


def run(cfg: EvalConfig) -> None:
    """Write results.json, summary.md and index.html to cfg.output_dir; ConfigError and InputError before anything is
    simulated. Some seconds in all."""
    every = pairs(cfg.overlap)
    if cfg.plan:
        sys.stdout.write("\n".join(plan_lines(cfg, every)) + "\n")
        return
    with open_run(cfg.output_dir, "eval", cfg, cfg.resume) as folder:
        if folder.is_finished:
            return
        began = time.perf_counter()
        content = make_results(cfg, every, 0.0)
        content["environment"]["report_seconds"] = time.perf_counter() - began
        write_files(folder, content, render_summary(content), render_page(content))
        folder.finish({"pairs": len(every)})
        log.info("report: %s", folder.file("index.html"))


def plan_lines(cfg: EvalConfig, every: Sequence[Pair]) -> list[str]:
    """For a person."""
    own = cfg.overlap
    settings = len(every) * len(own.links_ms) * len(own.draft_lengths) * len(WAYS)
    return [
        f"pairs: {', '.join(pair.name for pair in every)}",
        f"{count(settings, 'setting')} of {own.rounds:,} simulated rounds; no model is loaded",
    ]
