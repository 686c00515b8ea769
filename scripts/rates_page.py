"""Write docs/results/rates.md and its figures, rates/runs.json, from runs of `python -m train` that differ in width and
rates alone:

    python -m train target=smollm2 records=RECORDS draft=lm draft.width=256 muon_lr=0.02 lr=0.006 output_dir=RUN1 ...
    python scripts/rates_page.py RUN1 RUN2 ...

A run's figures are those of its last validation. Without runs the page alone is written, from the figures there are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from anywhere, as a script

from decode.common.markdown import table  # noqa: E402
from train.metrics_log import METRICS, read_metrics  # noqa: E402
from train.settled import width_scale  # noqa: E402

PAGE, FIGURES = ROOT / "docs/results/rates.md", ROOT / "docs/results/rates/runs.json"
HEAD = """# Learning rates by width

A draft LM of one layer and several widths, trained by Muon at several peak rates (AdamW's for its embedding in the same
proportion), judged on held-out chats by alpha, the chance of acceptance at T=1. "rule" is what `python -m train` takes
by itself: 0.01 at a width of 512, and in inverse proportion elsewhere. Before these runs narrower drafts took no more
than 0.01: at 128 a quarter of the best.

"""


def read_run(folder: Path) -> dict[str, Any]:
    """What one run says of itself."""
    last = {row["kind"]: row for row in read_metrics(folder / METRICS)}
    run = json.loads((folder / "run.json").read_text())
    config = json.loads((folder / "model/draftsmith.json").read_text())["config"]
    return {
        "width": config["draft"]["width"],
        "muon_lr": config["muon_lr"],
        "lr": config["lr"],
        "seed": config["seed"],
        "steps": config["steps"],
        "tokens": last["train"]["tokens"],
        "judged_tokens": last["validation"]["tokens"],
        "alpha": round(last["validation"]["alpha"], 4),
        "loss": round(last["validation"]["loss"], 4),
        "cpu": run["hardware"]["cpu"],
        "words": [one for one in run["argv"][1:] if not one.startswith(("output_dir=", "records=", "target.path="))],
    }


def page_of(runs: list[dict[str, Any]]) -> str:
    """A row for each width, a column for each rate."""
    rates = sorted({one["muon_lr"] for one in runs})
    found = {(one["width"], one["muon_lr"]): one["alpha"] for one in runs}
    assert len(found) == len(runs), "a width and rate has two runs; give those of one seed"
    rows = []
    for width in sorted({one["width"] for one in runs}):
        of_width = {rate: found[width, rate] for rate in rates if (width, rate) in found}
        best = max(of_width, key=lambda rate: of_width[rate])
        ruled = 0.01 * width_scale(width)
        cells = [f"{of_width[rate]:.3f}" if rate in of_width else "" for rate in rates]
        rows.append([str(width), *cells, f"{best:g}", f"{ruled:g}"])
    first, tokens = runs[0], [one["tokens"] for one in runs]
    command = " ".join(["python -m train", *first["words"], "records=...", "output_dir=..."])
    heads = ["width", *(f"{rate:g}" for rate in rates), "best", "rule"]
    return (
        HEAD
        + table(heads, rows)
        + f"\n\n{max(tokens):,} tokens in {first['steps']} steps, seed {first['seed']}; judged on "
        f"{first['judged_tokens']:,}. {first['cpu']}. The first by `{command}`, the others by their width and rates in "
        "place of its; the records are `head_tail_8_4` of `experiment=smollm2_stores`.\n"
    )


def main(*folders: str) -> None:
    """Read the runs, write both files."""
    if folders:
        runs = sorted((read_run(Path(one)) for one in folders), key=lambda one: (one["width"], one["muon_lr"]))
        FIGURES.parent.mkdir(exist_ok=True)
        FIGURES.write_text(json.dumps(runs, indent=1) + "\n")
    PAGE.write_text(page_of(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main(*sys.argv[1:])
