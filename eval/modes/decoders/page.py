"""A comparison of decoders: index.html, and summary.md or its page under docs/results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from eval.arms.base import AUTOREGRESSIVE
from eval.modes.decoders.cells import OURS
from eval.modes.decoders.tables import best_arms, decoder_tables
from eval.render.page import Page, Plot, as_html, as_markdown
from eval.render.plots import COLORS, GREY, draw


def render_page(results: dict[str, Any]) -> str:
    """The best settings, a plot of speed against batch size, every table, the method, and the definitions."""
    return as_html(_page(results))


def render_summary(results: dict[str, Any]) -> str:
    """The same without the plot."""
    return as_markdown(_page(results))


def _page(results: dict[str, Any]) -> Page:
    best = "; ".join(
        f"batch {one['batch_size']}, T={one['temperature']:g}: {one['best'][OURS]}" for one in results["choices"]
    )
    caption = "Times as fast as transformers generate, by prompts decoded at once; the best exact setting of each."
    return Page(
        title=f"Decoders compared: {results['name']}",
        results=results,
        method="decoders_method.j2",
        lead=f"The fastest exact setting, chosen on validation prompts: {best}.",
        plots=[Plot(lambda: _batch_plot(results), caption, is_wide=True)],
        every_table=decoder_tables(results),
    )


def _batch_plot(results: dict[str, Any]) -> str:
    """A panel per kind of text, a colour per temperature: our best setting, and dashed our autoregressive loop."""
    texts = list(dict.fromkeys(cell["text"] for cell in results["cells"]))
    temperatures = list(dict.fromkeys(cell["temperature"] for cell in results["cells"]))
    best = best_arms(results)

    def line(axis: Axes, text: str, temperature: float, arm: str | None, style: str, color: str, label: str) -> None:
        cells = [c for c in results["cells"] if (c["text"], c["temperature"]) == (text, temperature)]
        values = [_over(cell, arm or best[cell["batch_size"], temperature]) for cell in cells]
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
