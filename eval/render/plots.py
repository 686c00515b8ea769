"""The report's plots, as SVG to be set into the page: drawn from results.json alone, the training curves apart."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.render.formatting import named
from eval.results.reported import Report
from train.metrics_log import METRICS, read_metrics

Curves = dict[str, list[dict[str, Any]]]
"""draft -> lines of its metrics.jsonl."""
COLORS = ("#1f5fbf", "#c2571a", "#2a7f4f", "#7a4fa3", "#8a6d1b")
GREY = "#6b7280"
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.parse_math": False,  # a name with two dollar signs is no formula
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "legend.handlelength": 3,
    "lines.linewidth": 2,
    "lines.markersize": 6,
}


def draw(name: str, paint: Callable[[Sequence[Axes]], None], panels: int = 1, width: float = 5.2) -> str:
    """An <svg> element: `paint` fills the axes. Without metadata, doctype and namespaces it names no other resource."""
    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": name}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width * panels, 3.4), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        paint(list(axes))
        _legend_below(figure, axes[0])
        out = io.StringIO()
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return _inline(out.getvalue(), name)


def _legend_below(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    columns = min(len(labels), 2 * len(figure.axes))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=10)


def _inline(svg: str, name: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg class="plot" role="img" aria-label="{name}"', 1)


def drafts_of(results: Report) -> dict[str, str]:
    """draft -> its colour in every plot."""
    return {draft: COLORS[i % len(COLORS)] for i, draft in enumerate(results.drafts)}


def acceptance_plot(results: Report) -> str:
    """P(i-th draft token accepted | those before it), a line per draft and temperature."""
    colors, rows = drafts_of(results), results.overall
    dashes = dict(zip(dict.fromkeys(row.temperature for row in rows), ("-", "--", ":", "-."), strict=False))

    def paint(axes: Sequence[Axes]) -> None:
        for row in rows:
            values = row.acceptance_by_position
            label = f"{named(row)}, T={row.temperature:g}"
            style = dashes.get(row.temperature, "-")
            axes[0].plot(
                range(1, len(values) + 1), _gaps(values), style, marker="o", color=colors[row.draft], label=label
            )
        axes[0].set(xlabel="position in the draft", ylabel="accepted, if those before", ylim=(0, 1.02))
        axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))

    return draw("acceptance by position", paint)


def draft_length_plot(results: Report) -> str:
    """Measured speedup with its interval against k, and what the component times predict."""
    sweep = results.sweeps.num_draft_tokens
    timed = [(point, point.speedup) for point in sweep.points if point.speedup is not None]
    color = drafts_of(results)[sweep.draft]

    def paint(axes: Sequence[Axes]) -> None:
        k, measured = [p.num_draft_tokens for p, _ in timed], [speedup for _, speedup in timed]
        ends = [p.speedup_ci95 or [speedup] * 2 for p, speedup in timed]
        low = [value - end[0] for value, end in zip(measured, ends, strict=True)]
        high = [end[1] - value for value, end in zip(measured, ends, strict=True)]
        axes[0].errorbar(k, measured, [low, high], fmt="o-", color=color, capsize=3, label="measured, 95%")
        predicted = _gaps([p.predicted_speedup for p, _ in timed])
        axes[0].plot(k, predicted, "--", color=GREY, label="predicted from component times")
        axes[0].axhline(1, color=GREY, linewidth=1)
        axes[0].set(
            xlabel="draft tokens per target pass, k", ylabel="speedup over the baseline", ylim=(0, None), xticks=k
        )

    return draw("speedup against k", paint)


def temperature_plot(results: Report) -> str:
    """alpha, and the speedup it promises, against temperature."""
    sweep = results.sweeps.temperature

    def paint(axes: Sequence[Axes]) -> None:
        for draft, color in drafts_of(results).items():
            points = [p for p in sweep.points if p.draft == draft]
            t = [p.temperature for p in points]
            axes[0].plot(t, _gaps([p.alpha for p in points]), "o-", color=color, label=draft)
            axes[1].plot(t, _gaps([p.predicted_speedup for p in points]), "o-", color=color, label=draft)
        axes[0].set(xlabel="temperature", ylabel="alpha", ylim=(0, 1.02))
        axes[1].axhline(1, color=GREY, linewidth=1)
        axes[1].set(xlabel="temperature", ylabel=f"predicted speedup, k={sweep.num_draft_tokens}", ylim=(0, None))

    return draw("alpha and predicted speedup against temperature", paint, panels=2)


def training_plot(results: Report, curves: Curves) -> str:
    """Loss while training, and the held-out estimates of alpha and tau by which the checkpoint was chosen."""

    def paint(axes: Sequence[Axes]) -> None:
        for draft, color in drafts_of(results).items():
            lines = curves.get(draft, [])
            axes[0].plot(*series(lines, "train", "loss"), color=color, label=draft, linewidth=1.2)
            for axis, field in zip(axes[1:], ("alpha", "tau"), strict=True):
                axis.plot(*series(lines, "validation", field), "o-", color=color, label=draft, markersize=4)
        for axis, label in zip(axes, ("training loss", "held-out alpha", "held-out tau estimate"), strict=True):
            axis.set(xlabel="optimizer step", ylabel=label)

    return draw("training curves", paint, panels=3, width=3.6)


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def training_curves(drafts: Mapping[str, str]) -> Curves:
    """Metrics of the drafts whose run folder holds any: the folder itself, or the one that `model/` lies in."""
    curves: Curves = {}
    for name, path in drafts.items():
        file = next((f / METRICS for f in (Path(path), Path(path).parent) if (f / METRICS).is_file()), None)
        if file is not None:
            curves[name] = read_metrics(file)
    return curves


def series(lines: list[dict[str, Any]], kind: str, field: str) -> tuple[list[float], list[float]]:
    """Steps and values of one field in the lines of one kind."""
    points = [(line["step"], line[field]) for line in lines if line.get("kind") == kind and line.get(field) is not None]
    return [step for step, _ in points], [value for _, value in points]
