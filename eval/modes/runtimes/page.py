"""How fast records are made, as a page and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from eval.render.formatting import Column, Table, column, columns, count, number, share, spread, thousands, whole
from eval.render.page import Page, as_html, as_markdown

_NOTE = "Medians, in brackets the least to the most. Starting is not in tokens/s: a long run pays it once."


def render_page(results: dict[str, Any]) -> str:
    """The table of each kind of record, how it was measured, and the definitions."""
    return as_html(_page(results))


def render_summary(results: dict[str, Any]) -> str:
    """The same as Markdown."""
    return as_markdown(_page(results))


def _page(results: dict[str, Any]) -> Page:
    left_out = [f"Left out: {arm} {why}." for arm, why in results["left_out"].items()]
    return Page(
        title=f"How fast records are made: {results['name']}",
        results=results,
        method="runtimes_method.j2",
        lead=" ".join(_fastest(results, kind) for kind in results["kinds"]),
        headline_title="What is not in the tables" if left_out else "",
        headline=left_out,
        every_table=[_table(results, kind) for kind in results["kinds"]],
    )


def _fastest(results: Mapping[str, Any], kind: str) -> str:
    best = max(_of(results, kind), key=lambda one: median(one["ratios"]))
    first = next(iter(results["arms"]))
    if best["arm"] == first:
        return f"{kind}: nothing timed was faster than {first}."
    ratio, rounds = median(best["ratios"]), best["ratios"]
    return f"{kind}: {best['arm']} was the fastest, {number(ratio)} times {first} ({spread(rounds, 2)})."


def _of(results: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    return [one for one in results["speeds"] if one["kind"] == kind]


def _table(results: Mapping[str, Any], kind: str) -> Table:
    def cell(name: str, digits: int) -> Any:
        return lambda row: f"{number(median(row[name]), digits)} ({spread(row[name], digits)})"

    rows = _of(results, kind)
    first = next(iter(results["arms"]))
    shown = columns(
        *("arm", Column("tokens/s", cell("tokens_per_s", 0)), Column(f"times {first}", cell("ratios", 2))),
        *(column(f"{part} s", f"{part}_s", whole) for part in ("writing", "reading", "starting")),
        *(column("whole command s", "wall_s", whole), column("tokens", "tokens", thousands)),
        column(f"equal texts to {first}", "equal_texts", share),
    )
    rounds = count(len(rows[0]["ratios"]), "round")
    return Table(f"Records of {kind}", shown, rows, f"{rounds}. {_NOTE}")
