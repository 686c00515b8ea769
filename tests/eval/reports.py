"""Reports made up by hand: one draft LM and one head on two prompts, at one temperature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.results.document import DEFINITIONS
from eval.results.schema import SCHEMA, Row

TIMES = {"num_draft_tokens": 2, "t_target_1_s": 0.4, "t_target_k1_s": 0.5, "t_draft_s": 0.05}
PAIRS = [[0.4, 0.1], [0.4, 0.2]]
"""Seconds per token without a draft and with it: four times and twice as fast."""


def row(draft: str = "mine", **changes: Any) -> dict[str, Any]:
    """Of the draft LM `mine` unless told otherwise, k=2 at T=1."""
    values: dict[str, Any] = {"drafter": "lm", "draft": draft, "verifier": "coupled", "tree": "chain"}
    values |= {"dtype": "bfloat16", "text": "code", "temperature": 1.0, "batch_size": 1, "num_draft_tokens": 2}
    values |= {"seed": 0, "prompts": 2, "tokens": 20, "alpha": 0.75, "alpha_ci95": [0.5, 1.0], "alpha_tokens": 8}
    values |= {"tau": 2.0, "tau_ci95": [1.5, 2.5], "acceptance_by_position": [0.5, 0.25], "tokens_per_s": 7.5}
    values |= {"baseline": "own autoregressive loop", "baseline_tokens_per_s": 2.5, "speedup": 3.0}
    values |= {"speedup_ci95": [2.0, 4.0], "whole_call_speedup": 3.0, "whole_call_speedup_ci95": [2.0, 4.0]}
    values |= {"predicted_speedup": 3.0, "realised": 1.0, "component_times": TIMES, "ttft_s": 0.5}
    values |= {"itl_s": {"p50": 0.2, "p95": 0.4}, "mismatches": 0, "near_ties": 1, "tokens_checked": 100}
    values |= {"uncached_mismatches": 0, "uncached_near_ties": 0, "uncached_tokens_checked": 100}
    values |= {"dtype_flips": 1, "dtype_tokens_compared": 20, "repeated_4gram_share": 0.0, "peak_memory_bytes": 7}
    values |= {"alpha_by_document": [[2.0, 4.0], [4.0, 4.0]], "passes_by_prompt": [[15.0, 10.0], [25.0, 10.0]]}
    values |= {"seconds_by_prompt": PAIRS, "call_seconds_by_prompt": PAIRS}
    return Row.model_validate({**values, **changes}).model_dump()


def machine(name: str = "A", **changes: Any) -> dict[str, Any]:
    """Where and when a run took place."""
    found = {"cpu": name, "cores": 2, "threads": 2, "cuda_device": None, "python": "3", "packages": {}}
    found |= {"git": {"revision": "0123456789", "dirty": False}, "command": "python -m eval", "seed": 0}
    return {**found, "report_seconds": 10.0, "started": "2026-01-01T10:00:00+00:00", **changes}


def peer(pairs: list[list[float]], **changes: Any) -> dict[str, Any]:
    """transformers assisted generation at its best."""
    setting = {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0}
    found = {"name": "transformers assisted", "version": "5", "draft": "mine", "temperature": 1.0, "batch_size": 1}
    found |= {"best": True, "setting": setting, "prompts": "reported", "tokens_per_s": 4.0}
    return {**found, "ratio_ours_over_peer": 2.0, "ratio_ci95": [1.0, 3.0], "seconds_by_prompt": pairs, **changes}


def report(rows: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """results.json of one run."""
    rows = [row(), row("head", drafter="mtp", tau=1.5)] if rows is None else rows
    prompts = {"source": "held-out text", "sha256": "p", "reported": 2, "timed": 2, "screening": 1, "mean_tokens": 4.0}
    prompts |= {"max_new_tokens": 10, "rounds": 1, "wanted": {"reported": 2, "timed": 2, "screening": 1}}
    target = {"path": "t", "fingerprint": "f", "num_parameters": 10, "num_layers": 1, "hidden_size": 8}
    shown = ("num_draft_tokens", "tau", "tokens_per_s", "speedup", "speedup_ci95", "predicted_speedup", "realised")
    shown += ("passes_by_prompt", "seconds_by_prompt")
    points = [{name: rows[0][name] for name in shown}] if rows else []
    curve = [{"temperature": 1.0, "draft": "mine", "alpha": 0.75, "tau": 2.0, "predicted_speedup": 3.0}]
    arms = [{"temperature": 1.0, "arm": "own autoregressive loop", "tokens_per_s": 2.5}]
    found = {"schema": SCHEMA, "name": "made up", "mode": "report", "environment": machine(), "prompts": prompts}
    found |= {"target": {**target, "vocab_size": 9, "dtype": "bfloat16"}, "drafts": {"mine": "m", "head": "h"}}
    found |= {"fingerprints": {"mine": "1", "head": "2"}, "settings": {"decode": {"num_draft_tokens": 2}, "seed": 0}}
    found |= {
        "length_choice": None,
        "definitions": DEFINITIONS,
        "rows": rows,
        "peers": [peer([[0.3, 0.1], [0.2, 0.2]])],
    }
    found |= {"peers_left_out": None, "arms": arms}
    lengths = {"draft": "mine", "temperature": 1.0, "points": points}
    return {
        **found,
        "sweeps": {"num_draft_tokens": lengths, "temperature": {"num_draft_tokens": 2, "points": curve}},
        **changes,
    }


def three_runs() -> list[dict[str, Any]]:
    """On two machines, of which the second is half as fast without a draft and as fast with one."""
    slow = [[0.8, 0.1], [0.8, 0.2]]
    slow_row = row(speedup=6.0, seconds_by_prompt=slow, baseline_tokens_per_s=1.25, ttft_s=0.9)
    other = row("head", drafter="mtp", tau=1.5, speedup=2.0)
    times = [f"2026-01-0{day}T10:00:00+00:00" for day in (1, 2, 3)]
    return [
        report(environment=machine(started=times[0])),
        report([slow_row, other], environment=machine("B", started=times[1])),
        report([row(speedup=3.5, near_ties=2), other], environment=machine(started=times[2])),
    ]


def write(folder: Path, runs: list[dict[str, Any]]) -> list[Path]:
    """A file for each."""
    files = [folder / f"run{number}" / "results.json" for number in range(len(runs))]
    for file, run in zip(files, runs, strict=True):
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(run))
    return files
