"""A comparison of draft families: index.html, and summary.md or its page under docs/results."""

from __future__ import annotations

from typing import Any

from eval.modes.families.recommend import sentence
from eval.modes.families.tables import family_tables
from eval.render.formatting import count
from eval.render.page import Page, as_html, as_markdown


def render_page(results: dict[str, Any]) -> str:
    """The recommendation, every table, how it was measured, and the definitions."""
    return as_html(_page(results))


def render_summary(results: dict[str, Any]) -> str:
    """The same as Markdown."""
    return as_markdown(_page(results))


def _page(results: dict[str, Any]) -> Page:
    return Page(
        title=f"Draft families compared: {results['name']}",
        results=results,
        method="families_method.j2",
        lead=losslessness_of_all(results),
        headline_title="Which draft",
        headline=[sentence(advice) for advice in results["recommendation"]],
        every_table=family_tables(results),
    )


def losslessness_of_all(results: dict[str, Any]) -> str:
    """All comparisons with plain decoding in one sentence."""
    rows = results["quality"]
    wrong = sorted({row["arm"] for row in rows if row["mismatches"]})
    totals = {name: sum(row[name] for row in rows) for name in ("mismatches", "near_ties", "tokens_checked")}
    by = f" ({', '.join(wrong)})" if wrong else ""
    return (
        f"Against plain decoding of the same noise, over all arms: {count(totals['mismatches'], 'mismatch', 'es')}{by} "
        f"and {count(totals['near_ties'], 'near-tie')} in {totals['tokens_checked']:,} tokens."
    )
