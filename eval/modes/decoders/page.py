"""The suite's index.html: goals, a plot of speed against batch size, every table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from matplotlib.axes import Axes

from eval.arms.base import AUTOREGRESSIVE
from eval.modes.decoders.arms import our_name
from eval.modes.decoders.cells import OURS
from eval.modes.decoders.summary import method_facts
from eval.modes.decoders.tables import best_settings, reading, tables
from eval.render.page import document, facts_list, figure, html_table
from eval.render.plots import COLORS, GREY, draw


def render_page(results: dict[str, Any]) -> str:
    """The whole page."""
    caption = "Times as fast as transformers generate, by prompts decoded at once; the best exact setting of each."
    parts = [
        f"<h1>{escape(results.get('name') or results['suite'])}: {escape(results['target']['path'])}</h1>",
        f'<p class="lead">The fastest exact setting, by validation prompts: {escape(best_settings(results))}.</p>',
        f'<div class="plots">{figure(batch_plot(results), caption, wide=True)}</div>',
        *(html_table(table) for table in tables(results)),
        "<h2>How it was measured</h2>",
        facts_list(method_facts(results)),
        "<h2>Definitions</h2>",
        facts_list(results["definitions"]),
        "<h2>A plain reading</h2>",
        "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in reading(results)) + "</ul>",
    ]
    return document(f"{results.get('name') or results['suite']} · draftsmith decoders", parts)


def batch_plot(results: dict[str, Any]) -> str:
    """A panel per kind of text, a colour per temperature: our best setting, and dashed our autoregressive loop."""
    texts = list(dict.fromkeys(cell["text"] for cell in results["cells"]))
    temperatures = list(dict.fromkeys(cell["temperature"] for cell in results["cells"]))
    best = {(one["batch_size"], one["temperature"]): our_name(one["best"][OURS]) for one in results["choices"]}

    def line(axis: Axes, text: str, temperature: float, arm: str | None, style: str, color: str, label: str) -> None:
        cells = [c for c in results["cells"] if (c["text"], c["temperature"]) == (text, temperature)]
        names = [arm or best[c["batch_size"], temperature] for c in cells]
        values = [_over(cell, name) for cell, name in zip(cells, names, strict=True)]
        axis.plot([c["batch_size"] for c in cells], values, style, marker="o", color=color, label=label)

    def paint(axes: Sequence[Axes]) -> None:
        for axis, text in zip(axes, texts, strict=True):
            for temperature, color in zip(temperatures, COLORS, strict=False):
                line(axis, text, temperature, None, "-", color, f"best setting, T={temperature:g}")
                line(axis, text, temperature, AUTOREGRESSIVE, "--", color, f"autoregressive, T={temperature:g}")
            axis.axhline(1, color=GREY, linewidth=1)
            axis.set(xlabel=f"batch size ({text})", ylabel="over transformers generate", ylim=(0, None))

    return draw("speed against batch size", paint, panels=len(texts))


def _over(cell: dict[str, Any], arm: str) -> float:
    value = next((one["over_transformers"] for one in cell["arms"] if one["arm"] == arm), None)
    return float("nan") if value is None else value
