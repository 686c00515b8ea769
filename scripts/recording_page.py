"""Write docs/results/recording.json and its page from runs of `python -m distill`, some of each way of recording:

    python scripts/recording_page.py "First sentence." "old way=runs/old1,runs/old2" "new way=runs/new1,runs/new2"

Ratios are to the first way, run by run: give runs that were made one after another in the same place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from decode.common.environment import environment

FOLDER = Path("docs/results")
KEPT = {"dtype": ("target", "dtype"), "prompts": ("prompts", "count"), "new tokens": ("sampling", "max_new_tokens")}
KEPT |= {"temperature": ("sampling", "temperature"), "states of layers": ("records", "features", "layers")}


def read_run(folder: Path) -> dict[str, Any]:
    """What one run's manifest says: learned tokens, seconds by part, and the settings that its speed depends on."""
    manifest = json.loads((folder / "manifest.json").read_text())
    settings: dict[str, Any] = {"batch size": manifest["config"]["batch_size"], "seed": manifest["seed"]}
    for name, keys in KEPT.items():
        value = manifest["config"]
        for key in keys:
            value = value[key]
        settings[name] = value
    runtime = {key: manifest["runtime"][key] for key in ("name", "version")}
    return {"runtime": runtime, "learned_tokens": manifest["counts"]["learned_tokens"], "spent": manifest["spent"]} | {
        "settings": settings
    }


def rate(run: dict[str, Any], starting: bool = False) -> float:
    """Learned tokens a second, the start of an engine counted or not."""
    spent = run["spent"]
    return run["learned_tokens"] / (spent["writing"] + spent["reading"] + starting * spent["starting"])


def page_of(found: dict[str, Any]) -> str:
    """The page, from the content of the JSON alone."""
    ways: dict[str, list[dict[str, Any]]] = found["ways"]
    first = next(iter(ways.values()))
    settings = ", ".join(f"{name} {value}" for name, value in first[0]["settings"].items())
    lines = ["# Recording", "", "<!-- Written by `python scripts/recording_page.py`. -->", "", found["note"], ""]
    lines += [f"{settings}; {found['cpu']}, {found['threads']} threads.", ""]
    lines += ["| way | tokens/s | by run | over the first | starting | with it |", "|---|---|---|---|---|---|"]
    for name, runs in ways.items():
        rates = [rate(run) for run in runs]
        ratios = [rate(run) / rate(other) for run, other in zip(runs, first, strict=True)]
        lines.append(
            f"| {name} | {median(rates):.0f} | {', '.join(f'{one:.0f}' for one in rates)} | {median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {median(run['spent']['starting'] for run in runs):.0f} s "
            f"| {median(rate(run, starting=True) for run in runs):.0f} |"
        )
    return "\n".join([*lines, "", "Tokens are those that a draft learns from.", ""])


def main(note: str, *given: str) -> None:
    """Read the runs, write both files."""
    ways = {}
    for one in given:
        name, folders = one.split("=", 1)
        ways[name] = [read_run(Path(folder)) for folder in folders.split(",")]
    here = environment()
    found = {"note": note, "cpu": here["cpu"], "threads": here["threads"], "ways": ways}
    (FOLDER / "recording.json").write_text(json.dumps(found, indent=2) + "\n")
    (FOLDER / "recording.md").write_text(page_of(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
