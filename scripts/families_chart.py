"""Draw the README's chart, docs/results/families.svg, from families.json beside it: `python scripts/families_chart.py`.

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

ROOT = Path(__file__).resolve().parents[1]
SOURCE, CHART = ROOT / "docs/results/families.json", ROOT / "docs/results/families.svg"
MOST = 3.5
"""Where the axis ends; the figures stand behind it."""
LOOKS = {1.0: {"marker": "o", "color": "#1f5fbf"}, 0.0: {"marker": "D", "color": "#c2571a"}}
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "families", "font.family": "sans-serif"}


def draw(destination: Path) -> None:
    """The chart: each family's tau in chains after equal tokens, with its interval, at both temperatures."""
    content = SOURCE.read_bytes()
    results = json.loads(content)
    wanted = ("tokens", "chain", results["quality"][0]["code"])
    shown = [one for one in results["quality"] if (one["budget"], one["shape"], one["code"]) == wanted]
    order = [one["arm"] for one in sorted(shown, key=lambda one: one["tau"]) if one["temperature"] == 1.0]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 3.9), layout="constrained")
        axes = figure.subplots()
        for temperature in LOOKS:
            _points(axes, [one for one in shown if one["temperature"] == temperature], order, temperature)
        _frame(axes, order, f"tokens per target pass (tau), after {results['budgets']['tokens']:,} tokens of training")
        source = f"{SOURCE.name}, SHA-256 {hashlib.sha256(content).hexdigest()}"
        figure.savefig(destination, format="svg", facecolor="white", metadata={"Date": None, "Source": source})


def _points(axes: Axes, found: list[dict[str, Any]], order: list[str], temperature: float) -> None:
    shift = 0.16 if temperature else -0.16
    for one in found:
        tau, (low, high) = one["tau"], one["tau_ci95"]
        place, spread, look = order.index(one["arm"]) + shift, [[tau - low], [high - tau]], LOOKS[temperature]
        name = f"T={temperature:g}" if one is found[0] else None
        axes.errorbar(tau, place, xerr=spread, capsize=3, linestyle="none", label=name, **look)  # type: ignore[arg-type]
        axes.text(MOST + 0.12, place, f"{tau:.2f} [{low:.2f}, {high:.2f}]", va="center", fontsize=9, color="#374151")


def _frame(axes: Axes, order: list[str], label: str) -> None:
    axes.axvline(1, color="#6b7280", linestyle="--", label="without a draft")
    axes.set_xlim(0.9, MOST + 0.9)
    axes.set_xticks([1, 1.5, 2, 2.5, 3, MOST])
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9, bbox_to_anchor=(0.77, 0.0))


if __name__ == "__main__":
    draw(CHART)
