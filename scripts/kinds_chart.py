"""Draw the README's chart, docs/results/smollm2.svg, from smollm2.json beside it: `python scripts/kinds_chart.py`.

The SVG names the SHA-256 of the JSON and holds no date: the same file and library give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.results.published import unpacked

ROOT = Path(__file__).resolve().parents[1]
SOURCE, CHART = ROOT / "docs/results/smollm2.json", ROOT / "docs/results/smollm2.svg"
COLOURS = ["#1f5fbf", "#c2571a", "#2f7d3b", "#7a3fa0"]
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "kinds", "font.family": "sans-serif"}
ALL = "all kinds"


def draw(destination: Path) -> None:
    """The chart: each draft's speedup by kind of text with its interval, a panel for each temperature."""
    content = SOURCE.read_bytes()
    results = unpacked(json.loads(content))
    rows = [one for one in results["rows"] if not one["setting"] and one["speedup"] is not None]
    temperatures = sorted({one["temperature"] for one in rows})
    kinds = [ALL, *sorted({one["category"] for one in rows if one["category"] is not None}, reverse=True)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.9), layout="constrained")
        panels = figure.subplots(1, len(temperatures), sharex=True, sharey=True, squeeze=False)[0]
        for axes, temperature in zip(panels, temperatures, strict=True):
            _points(axes, [one for one in rows if one["temperature"] == temperature], list(results["drafts"]), kinds)
            _frame(axes, kinds, f"times as fast as without a draft, T={temperature:g}")
        panels[-1].legend(loc="lower right", frameon=False, fontsize=9)
        source = f"{SOURCE.name}, SHA-256 {hashlib.sha256(content).hexdigest()}"
        figure.savefig(destination, format="svg", facecolor="white", metadata={"Date": None, "Source": source})


def _points(axes: Axes, rows: list[dict[str, Any]], drafts: list[str], kinds: list[str]) -> None:
    for number, draft in enumerate(drafts):
        found = [one for one in rows if one["draft"] == draft]
        places = [kinds.index(one["category"] or ALL) + 0.2 * ((len(drafts) - 1) / 2 - number) for one in found]
        means, ends = [one["speedup"] for one in found], [one["speedup_ci95"] for one in found]
        spread = [
            [mean - low for mean, (low, _) in zip(means, ends, strict=True)],
            [high - mean for mean, (_, high) in zip(means, ends, strict=True)],
        ]
        look: dict[str, Any] = {"fmt": "o", "color": COLOURS[number % len(COLOURS)], "label": draft}
        axes.errorbar(means, places, xerr=spread, capsize=3, markersize=4, linestyle="none", **look)


def _frame(axes: Axes, kinds: list[str], label: str) -> None:
    axes.axvline(1, color="#6b7280", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    draw(CHART)
