"""Draw the README's charts from the JSON files beside them in docs/results: `python scripts/kinds_chart.py`.

An SVG names the SHA-256 of its JSON and holds no date: the same file and library give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.results.published import unpacked

RESULTS = Path(__file__).resolve().parents[1] / "docs/results"
COLOURS = ["#1f5fbf", "#c2571a", "#2f7d3b", "#7a3fa0", "#6b7280", "#b8860b"]
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "kinds", "font.family": "sans-serif"}
ALL = "all kinds"
Point = tuple[float, str, str, float, tuple[float, float]]
"""Temperature, arm, kind of text, times as fast as without a draft, 95% interval."""


def of_report(results: Mapping[str, Any]) -> Iterator[Point]:
    """Each draft of a report."""
    for one in results["rows"]:
        if not one["setting"] and one["speedup"] is not None:
            kind = one["category"] or ALL
            yield one["temperature"], one["draft"], kind, one["speedup"], one["speedup_ci95"]


def of_drafters(results: Mapping[str, Any]) -> Iterator[Point]:
    """What drafts in a comparison, ours and the peers', and peers without a draft."""
    for cell in results["cells"]:
        for arm in cell["arms"]:
            if arm["arm"] != "own autoregressive loop" and arm["over_plain"] is not None:
                yield cell["temperature"], arm["arm"], cell["text"], arm["over_plain"], arm["over_plain_ci95"]


CHARTS = {"smollm2": of_report, "smollm2_peers": of_drafters}


def draw(name: str, destination: Path) -> None:
    """One chart: each arm's speed by kind of text with its interval, a panel for each temperature."""
    content = (RESULTS / f"{name}.json").read_bytes()
    points = [*CHARTS[name](unpacked(json.loads(content)))]
    temperatures, arms = sorted({point[0] for point in points}), [*dict.fromkeys(point[1] for point in points)]
    kinds = sorted({point[2] for point in points}, key=lambda kind: (kind == ALL, kind), reverse=True)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.9), layout="constrained")
        panels = figure.subplots(1, len(temperatures), sharex=True, sharey=True, squeeze=False)[0]
        for axes, temperature in zip(panels, temperatures, strict=True):
            _points(axes, [point for point in points if point[0] == temperature], arms, kinds)
            _frame(axes, kinds, f"times as fast as without a draft, T={temperature:g}")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=9
        )
        source = f"{name}.json, SHA-256 {hashlib.sha256(content).hexdigest()}"
        figure.savefig(destination, format="svg", facecolor="white", metadata={"Date": None, "Source": source})


def _points(axes: Axes, points: list[Point], arms: list[str], kinds: list[str]) -> None:
    for number, arm in enumerate(arms):
        found = [point for point in points if point[1] == arm]
        height = 0.6 / (len(arms) - 1) if len(arms) > 1 else 0.0
        places = [kinds.index(point[2]) + height * ((len(arms) - 1) / 2 - number) for point in found]
        means, ends = [point[3] for point in found], [point[4] for point in found]
        spread = [
            [mean - low for mean, (low, _) in zip(means, ends, strict=True)],
            [high - mean for mean, (_, high) in zip(means, ends, strict=True)],
        ]
        look: dict[str, Any] = {"fmt": "o", "color": COLOURS[number % len(COLOURS)], "label": arm}
        axes.errorbar(means, places, xerr=spread, capsize=3, markersize=4, linestyle="none", **look)


def _frame(axes: Axes, kinds: list[str], label: str) -> None:
    axes.axvline(1, color="#6b7280", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    for chart in CHARTS:
        draw(chart, RESULTS / f"{chart}.svg")
