"""What each early exit drafts and costs, as a page and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from eval.modes.exits.measuring import best_of
from eval.render.formatting import Column, Table, column, columns, estimate, milliseconds, number, short
from eval.render.page import Page, Plot, as_html, as_markdown
from eval.render.plots import COLORS, GREY, draw

Entry = Mapping[str, Any]


def render_page(results: dict[str, Any]) -> str:
    """The table, a plot of predicted speedup by layer, and the definitions."""
    return as_html(_page(results))


def render_summary(results: dict[str, Any], is_published: bool = False) -> str:
    """The same as Markdown, without the plot."""
    return as_markdown(_page(results), is_published=is_published)


def _page(results: dict[str, Any]) -> Page:
    return Page(
        title=f"Where to leave the target: {results['name']}",
        results=results,
        method="exits_method.j2",
        headline_title="In short",
        headline=list(_sentences(results)),
        every_table=[_table(results)],
        plots=[
            Plot(lambda: _by_layer(results), "Predicted speedup by the layer that is left behind, without adapters")
        ],
    )


def _temperatures(results: Mapping[str, Any]) -> list[float]:
    return list(dict.fromkeys(one["temperature"] for one in results["exits"]))


def _sentences(results: Mapping[str, Any]) -> Iterator[str]:
    plain = [one for one in results["exits"] if one["draft"] is None]
    for temperature in _temperatures(results):
        best = best_of(plain, temperature)
        sentence = f"T={short(temperature)}: {_says(best)}"
        trained = [one for one in results["exits"] if one["draft"] is not None and one["temperature"] == temperature]
        yield f"{sentence}; with an adapter {_says(best_of(trained, temperature))}." if trained else f"{sentence}."


def _says(best: Entry) -> str:
    if best["predicted_speedup"] <= 1:
        return f"no exit pays, the best is {best['exit']} with {number(best['predicted_speedup'])} times plain decoding"
    k = best["num_draft_tokens"]
    return f"{best['exit']} with k={k}, predicted {number(best['predicted_speedup'])} times plain decoding"


def _table(results: Mapping[str, Any]) -> Table:
    shown = columns(
        *("T", "exit", column("layers", "exit_layer"), estimate("alpha", digits=3)),
        column("t_lower", "t_lower_s", milliseconds),
        Column("of a pass", lambda one: number(one["t_lower_s"] / results["t_target_1_s"])),
        *("k", column("predicted", "predicted_speedup", number)),
    )
    note = f"A plain pass takes {milliseconds(results['t_target_1_s'])}. Predicted, not run: mode=drafters times it."
    return Table("Exits", shown, results["exits"], note)


def _by_layer(results: Mapping[str, Any]) -> str:
    def paint(axes: Sequence[Axes]) -> None:
        (axis,) = axes
        for color, temperature in zip(COLORS, _temperatures(results), strict=False):
            own = [one for one in results["exits"] if one["draft"] is None and one["temperature"] == temperature]
            points = [(one["exit_layer"], one["predicted_speedup"]) for one in own]
            axis.plot(*zip(*points, strict=True), "o-", color=color, label=f"T={short(temperature)}")
        axis.axhline(1, color=GREY, linewidth=1)
        axis.set_xlabel("layers that draft")
        axis.set_ylabel("predicted speedup")

    return draw("exits", paint)
