"""The report: index.html, summary.md, and the short form for README.md."""

from __future__ import annotations

from typing import Any

from eval.render.formatting import size
from eval.render.page import Page, Plot, as_html, as_markdown
from eval.render.plots import acceptance_plot, draft_length_plot, temperature_plot, training_plot
from eval.render.report_tables import main_table, overall_rows, report_tables
from eval.results.training_curves import Curves

_GREEDY = (
    "Greedy decoding only: figures at temperature 0 depend on how much the text repeats itself, so none is a headline."
)


def render_page(results: dict[str, Any], curves: Curves) -> str:
    """The whole page: headline figures, plots, tables, method, definitions."""
    return as_html(_page(results, curves), "report.html.j2", **_headline(results))


def render_summary(results: dict[str, Any]) -> str:
    """Headline sentences, every table, how it was measured, and the definitions."""
    return as_markdown(_page(results, {}), "report.md.j2", **_headline(results))


def render_block(results: dict[str, Any]) -> str:
    """The short form for README.md: headline, main table, machine and command."""
    return as_markdown(_page(results, {}), "block.md.j2", main=main_table(results), **_headline(results)).strip()


def headline_row(results: dict[str, Any]) -> dict[str, Any] | None:
    """The first draft's row over all prompts at the first temperature above 0; a greedy row is never a headline."""
    return next((row for row in results["rows"] if row["category"] is None and row["temperature"] > 0), None)


def _headline(results: dict[str, Any]) -> dict[str, Any]:
    """What the headline tells of: its row, those of other drafts at its temperature, and the best peer there."""
    row = headline_row(results)
    if row is None:
        return {"row": None}
    peers = [one for one in results["peers"] if one["temperature"] == row["temperature"]]
    others = [one for one in overall_rows(results) if one["temperature"] == row["temperature"]]
    return {
        "row": row,
        "others": [one for one in others if one["draft"] != row["draft"]],
        "peer": next((one for one in peers if one["best"]), None),
        "num_tried": sum(not one["best"] for one in peers),
    }


def _page(results: dict[str, Any], curves: Curves) -> Page:
    target = results["target"]
    return Page(
        title=f"Report: {results['name']}",
        results=results,
        method="report_method.j2",
        lead=f"A target of {size(target)}, {target['dtype']} ({target['path']}), served with the drafts "
        f"{', '.join(results['drafts'])}; its output does not change. Sampled decoding first.",
        headline=[_GREEDY],
        plots=_plots(results, curves),
        every_table=report_tables(results),
    )


def _plots(results: dict[str, Any], curves: Curves) -> list[Plot]:
    lengths = "Speedup against draft length, measured in the interleaved run, and predicted from component times."
    acceptance = "Acceptance by position in the draft, counted in the timed run."
    temperatures = (
        "alpha and the speedup it promises, teacher-forced, against temperature. The coupled verifier accepts "
        "slightly less than alpha, so this prediction is an upper estimate."
    )
    training = "Training curves. Losses of different objectives are on different scales; alpha and tau compare."
    sweeps = results["sweeps"]
    plots = [
        (sweeps["num_draft_tokens"]["points"], Plot(lambda: draft_length_plot(results), lengths)),
        (True, Plot(lambda: acceptance_plot(results), acceptance)),
        (sweeps["temperature"]["points"], Plot(lambda: temperature_plot(results), temperatures, is_wide=True)),
        (curves, Plot(lambda: training_plot(results, curves), training, is_wide=True)),
    ]
    return [plot for has_points, plot in plots if has_points]
