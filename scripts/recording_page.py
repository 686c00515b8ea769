"""Write docs/results/recording.md and its figures, recording/runs.json, from runs of `python -m distill`:

    python scripts/recording_page.py "First sentences." "old way=runs/old1,runs/old2" "new way=runs/new1,runs/new2"

Ratios are to the first way, run by run: give runs that were made one after another in the same place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path("docs/results")


def read_run(folder: Path) -> dict[str, Any]:
    """What one run says of itself: command, when and where, learned tokens, and seconds by part."""
    manifest, run = (json.loads((folder / name).read_text()) for name in ("manifest.json", "run.json"))
    words = [key + "=" + value.rpartition("/")[2] for key, _, value in (one.partition("=") for one in run["argv"][1:])]
    return {
        "command": " ".join(["python -m distill", *words]),
        "revision": run["git"]["revision"],
        "started": run["started"],
        "cpu": run["hardware"]["cpu"],
        "threads": run["hardware"]["threads"],
        "runtime": {key: manifest["runtime"][key] for key in ("name", "version")},
        "learned_tokens": manifest["counts"]["learned_tokens"],
        "spent": manifest["spent"],
        "seed": manifest["seed"],
    }


def rate(run: dict[str, Any], starting: bool = False) -> float:
    """Learned tokens a second, the start of an engine counted or not."""
    spent = run["spent"]
    return run["learned_tokens"] / (spent["writing"] + spent["reading"] + starting * spent["starting"])


def page_of(found: dict[str, Any]) -> str:
    """The page, from the content of the JSON alone."""
    ways: dict[str, list[dict[str, Any]]] = found["ways"]
    first = next(iter(ways.values()))
    lines = ["# Recording", "", "<!-- Written by `python scripts/recording_page.py`. -->", "", found["note"], ""]
    lines += ["| way | tokens/s | by run | over the first | starting | with it |", "|---|---|---|---|---|---|"]
    for name, runs in ways.items():
        rates = [rate(run) for run in runs]
        ratios = [rate(run) / rate(other) for run, other in zip(runs, first, strict=True)]
        lines.append(
            f"| {name} | {median(rates):.0f} | {', '.join(f'{one:.0f}' for one in rates)} | {median(ratios):.1f} "
            f"({min(ratios):.1f} to {max(ratios):.1f}) | {median(run['spent']['starting'] for run in runs):.0f} s "
            f"| {median(rate(run, starting=True) for run in runs):.0f} |"
        )
    lines += ["", "Tokens are those that a draft learns from. Medians over runs, with their range.", ""]
    lines += [f"{first[0]['cpu']}, {first[0]['threads']} threads, seed {first[0]['seed']}. Commands:", ""]
    for name, runs in ways.items():
        lines.append(f"- {name}, revision {runs[-1]['revision'][:7]}: `{runs[-1]['command']}`")
    return "\n".join([*lines, ""])


def main(note: str, *given: str) -> None:
    """Read the runs, write both files."""
    ways = {}
    for one in given:
        name, folders = one.split("=", 1)
        ways[name] = [read_run(Path(folder)) for folder in folders.split(",")]
    found = {"note": note, "ways": ways}
    (FOLDER / "recording/runs.json").write_text(json.dumps(found, indent=2) + "\n")
    (FOLDER / "recording.md").write_text(page_of(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
