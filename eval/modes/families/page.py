"""A comparison of draft families: index.html, and summary.md or its page under docs/results."""

from __future__ import annotations

from typing import Any

from eval.modes.families.recommend import sentence
from eval.modes.families.tables import family_tables
from eval.render.facts import origin_facts, setup_facts, title_of
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
        title=f"Draft families compared: {title_of(results)}",
        lead=losslessness_of_all(results),
        headline_title="Which draft",
        headline=[sentence(advice) for advice in results["recommendation"]],
        every_table=family_tables(results),
        method=_method(results),
        definitions=results["definitions"],
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


def _method(results: dict[str, Any]) -> dict[str, str]:
    """How it was measured, as name -> words."""
    prompts = results["prompts"]
    batches = ", ".join(f"{number} of {rows}" for rows, number in prompts["batches"].items())
    records = ", ".join(f"{code} ({path})" for code, path in results["records"].items())
    return {
        **setup_facts(results),
        "Training": f"{', '.join(results['arms'])}; seeds {results['budgets']['seeds']}; records {records}",
        "tau and losslessness": f"{prompts['source']}: {prompts['checked']} prompts, up to {prompts['checked_tokens']} "
        f"new tokens each, in {prompts['checked_dtype']}",
        "Speed": f"batches of prompts timed per cell: {batches}; {prompts['mean_tokens']:.0f} tokens each, up to "
        f"{prompts['max_new_tokens']} new ones, {count(prompts['rounds'], 'round')}; all arms answer each batch one "
        "after another in a drawn order, after warm-up",
        "Draft lengths chosen on": f"{prompts['screening_source']}: {prompts['screening_batches']} batches, "
        f"{prompts['screening_tokens']} new tokens, k of {prompts['draft_lengths']}",
        **origin_facts(results),
        "Time": f"{results['environment']['report_seconds']:.0f} s of training and measuring",
    }
