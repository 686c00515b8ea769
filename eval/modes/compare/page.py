"""The page of a comparison, as HTML and as Markdown: what is the fastest, a plot, and every table."""

from __future__ import annotations

from typing import Any

from eval.modes.compare import decoder_tables, drafter_tables
from eval.render.page import Page
from eval.results.compared import Comparison


def page_of(results: dict[str, Any]) -> Page:
    """What was found, a plot, every table and the method."""
    found = Comparison.model_validate(results)
    if found.mode == "decoders":
        return Page(
            title=f"Decoders compared: {found.name}",
            results=results,
            method="decoders_method.j2",
            lead=decoder_tables.lead(found),
            plots=[decoder_tables.plot(found)],
            every_table=decoder_tables.tables(found),
        )
    return Page(
        title=f"Ways to draft compared: {found.name}",
        results=results,
        method="drafters_method.j2",
        lead="Ways to draft, each on texts of several kinds. With all of ours the text is the target's own, but for "
        "rounding.",
        headline_title="In short",
        headline=[drafter_tables.sentence(found, text) for text in found.texts],
        plots=[drafter_tables.plot(found)],
        every_table=drafter_tables.tables(found),
    )
