"""The suite as Markdown: summary.md, and the page under docs/results."""

from __future__ import annotations

from typing import Any

from decode.common.markdown import bullets, definitions, facts, plain
from eval.modes.families.recommend import sentence
from eval.modes.families.tables import tables
from eval.render.formatting import count
from eval.render.summary import markdown_table, setup_facts


def render_summary(results: dict[str, Any]) -> str:
    """The recommendation, every table, how it was measured, and the definitions."""
    parts = [
        f"# Draft families compared: {plain(results.get('name') or results['suite'])}",
        "## Which draft",
        bullets(plain(sentence(advice)) for advice in results["recommendation"]),
        plain(losslessness(results)),
        *(markdown_table(table, heading="##") for table in tables(results)),
        "## How it was measured",
        facts(method_facts(results)),
        "## Definitions",
        definitions(results["definitions"]),
    ]
    return "\n\n".join(parts) + "\n"


def losslessness(results: dict[str, Any]) -> str:
    """All comparisons with plain decoding in one sentence."""
    totals = {
        name: sum(row[name] for row in results["quality"]) for name in ("mismatches", "near_ties", "tokens_checked")
    }
    wrong = sorted({row["arm"] for row in results["quality"] if row["mismatches"]})
    return (
        f"Against plain decoding of the same noise, over all arms: {count(totals['mismatches'], 'mismatch', 'es')}"
        f"{' (' + ', '.join(wrong) + ')' if wrong else ''} and {count(totals['near_ties'], 'near-tie')} in "
        f"{totals['tokens_checked']:,} tokens."
    )


def method_facts(results: dict[str, Any]) -> dict[str, str]:
    """How it was measured, as name -> words."""
    environment, prompts = results["environment"], results["prompts"]
    batches = ", ".join(f"{number} of {rows}" for rows, number in prompts["batches"].items())
    return {
        **setup_facts(results),
        "Training": f"{', '.join(results['arms'])}; seeds {results['budgets']['seeds']}; records "
        + ", ".join(f"{code} ({path})" for code, path in results["records"].items()),
        "tau and losslessness": f"{prompts['source']}: {prompts['checked']} prompts, up to {prompts['checked_tokens']} "
        f"new tokens each, in {prompts['checked_dtype']}",
        "Speed": f"batches of prompts timed per cell: {batches}; {prompts['mean_tokens']:.0f} tokens each, up to "
        f"{prompts['max_new_tokens']} new ones, {count(prompts['rounds'], 'round')}; all arms answer each batch one "
        "after another in a drawn order, after warm-up",
        "Draft lengths chosen on": f"{prompts['screening_source']}: {prompts['screening_batches']} batches, "
        f"{prompts['screening_tokens']} new tokens, k of {prompts['draft_lengths']}",
        "Seed": str(environment["seed"]),
        "Command": f"`{environment['command']}`",
        "Time": f"{environment['report_seconds']:.0f} s of training and measuring",
    }
