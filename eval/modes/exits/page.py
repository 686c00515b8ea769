"""What each early exit drafts and costs, as a page and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes

from eval.modes.exits.measuring import Entry, Exits, best_of
from eval.render.formatting import Column, Table, column, columns, milliseconds, number, short, with_interval
from eval.render.page import Page, Plot
from eval.render.plots import COLORS, GREY, draw


def page_of(results: dict[str, Any]) -> Page:
    """The table, and a plot of predicted speedup by layer."""
    found = Exits.model_validate(results)
    return Page(
        title=f"Where to leave the target: {found.name}",
        results=results,
        method="exits_method.j2",
        headline_title="In short",
        headline=list(_sentences(found)),
        every_table=[_table(found)],
        plots=[Plot(lambda: _by_layer(found), "Predicted speedup by the layer that is left behind, without adapters")],
    )


def _sentences(found: Exits) -> Iterator[str]:
    for temperature in found.temperatures:
        sentence = f"T={short(temperature)}: {_says(best_of(found.plain, temperature))}"
        trained = [one for one in found.exits if one.draft is not None and one.temperature == temperature]
        yield f"{sentence}; with an adapter {_says(best_of(trained, temperature))}." if trained else f"{sentence}."


def _says(best: Entry) -> str:
    times = f"{number(best.predicted_speedup)} times plain decoding"
    if best.predicted_speedup <= 1:
        return f"no exit pays, the best is {best.exit} with {times}"
    return f"{best.exit} with k={best.num_draft_tokens}, predicted {times}"


def _table(found: Exits) -> Table:
    shown = columns(
        *("T", "exit", column("layers", "exit_layer")),
        Column("alpha", lambda one: with_interval(one.alpha, one.alpha_ci95, 3)),
        column("t_lower", "t_lower_s", milliseconds),
        Column("of a pass", lambda one: number(one.t_lower_s / found.t_target_1_s)),
        *("k", column("predicted", "predicted_speedup", number)),
    )
    note = f"A plain pass takes {milliseconds(found.t_target_1_s)}. Predicted, not run: mode=drafters times it."
    return Table("Exits", shown, found.exits, note)


def _by_layer(found: Exits) -> str:
    def paint(axes: Sequence[Axes]) -> None:
        (axis,) = axes
        for color, temperature in zip(COLORS, found.temperatures, strict=False):
            points = [(one.exit_layer, one.predicted_speedup) for one in found.plain if one.temperature == temperature]
            axis.plot(*zip(*points, strict=True), "o-", color=color, label=f"T={short(temperature)}")
        axis.axhline(1, color=GREY, linewidth=1)
        axis.set_xlabel("layers that draft")
        axis.set_ylabel("predicted speedup")

    return draw("exits", paint)
