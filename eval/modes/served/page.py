"""What an engine makes of drafts, as a page and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from eval.modes.served.results import speed_of
from eval.render.formatting import MISSING, Column, Table, columns, number, spread, with_interval
from eval.render.page import Page, as_html, as_markdown

_NO_SCHEDULE = (
    "Nothing: a schedule takes the target alone and each draft, timed by servers started here in two rounds or "
    "more (served.rounds, served.batch_sizes)."
)


def render_page(results: dict[str, Any]) -> str:
    """The verdicts, every table, how it was measured, and the definitions."""
    return as_html(_page(results), "served.html.j2", no_schedule=_NO_SCHEDULE)


def render_summary(results: dict[str, Any], is_published: bool = False) -> str:
    """The same as Markdown."""
    return as_markdown(_page(results), "served.md.j2", is_published, no_schedule=_NO_SCHEDULE)


def _page(results: dict[str, Any]) -> Page:
    return Page(
        title=f"Drafts served: {results['name']}",
        results=results,
        method="served_method.j2",
        lead=lead(results),
        headline_title="Whether the engine drafts as we do",
        headline=[said(one) for one in results["comparisons"]],
        every_table=served_tables(results),
    )


def lead(results: Mapping[str, Any]) -> str:
    """All verdicts in one sentence."""
    every, engine = results["comparisons"], f"{results['engine']['name']} {results['engine']['version']}".strip()
    parted = [f"{one['draft']} at T={one['temperature']:g}" for one in every if one["verdict"] == "parted"]
    if not parted:
        return f"{engine} accepts of every draft what our decoder accepts."
    return f"{engine} accepts otherwise than our decoder: {', '.join(parted)}."


def said(one: Mapping[str, Any]) -> str:
    """A comparison in a sentence, with the faults that would explain it."""
    there, here = one["engine"], one["ours"]
    words = {
        "equal": "counters are equal, prompt by prompt",
        "within intervals": "counters agree within their intervals",
        "parted": "counters part",
    }
    text = (
        f"{one['draft']} ({one['form']}), T={one['temperature']:g}: {words[one['verdict']]}: "
        f"{there['drafts']:,} drafts, "
        f"accepted {there['accepted']} there; {here['drafts']:,} and {here['accepted']} here."
    )
    return text + "".join(f" {fault}" for fault in one["faults"])


def served_tables(results: dict[str, Any]) -> list[Table]:
    """Every table, in reading order."""
    return [_acceptance_table(results), *_speed_tables(results), _our_speeds(results), _lengths(results)]


def _lengths(results: Mapping[str, Any]) -> Table:
    rows = [{"draft": one["draft"], **length} for one in results["schedules"] for length in one["lengths"]]
    shown = columns(
        "draft",
        "batch",
        "k",
        Column("times the target alone", lambda row: with_interval(row["over_alone"], row["ci95"])),
    )
    note = "What is drafted at each batch size, and how much faster that is; brackets are the error bar over rounds."
    return Table("Draft length by batch size", shown, rows, note, is_detail=True)


def _acceptance_table(results: Mapping[str, Any]) -> Table:
    rows = [{**one, "place": place} for one in results["comparisons"] for place in range(one["num_draft_tokens"])]

    def shown(where: str) -> Column:
        def cell(row: Mapping[str, Any]) -> str:
            found = row[where]
            return with_interval(found["acceptance_by_position"][row["place"]], found["ci95_by_position"][row["place"]])

        return Column(f"{where}'s" if where == "engine" else where, cell)

    shown_columns = columns(
        *("draft", "T", Column("position", lambda row: str(row["place"] + 1))),
        *(shown("engine"), shown("ours"), Column("verdict", lambda row: row["verdict"])),
    )
    note = "Brackets are 95% intervals over prompts."
    return Table("Acceptance by position", shown_columns, rows, note)


def _speed_tables(results: Mapping[str, Any]) -> list[Table]:
    """For each draft, its lengths by batch size, over the target alone."""
    sizes = list(dict.fromkeys(one["batch_size"] for one in results["speeds"]))
    names = list(dict.fromkeys(one["draft"] for one in results["speeds"] if one["draft"] is not None))
    return [_speed_table(results, name, sizes) for name in names]


def _speed_table(results: Mapping[str, Any], name: str, sizes: list[int]) -> Table:
    rows = [one for one in results["speeds"] if one["draft"] == name]
    lengths = sorted({one["num_draft_tokens"] for one in rows})
    speeds = {(one["draft"], one["num_draft_tokens"], one["batch_size"]): one for one in results["speeds"]}

    def cell(draft: str | None, k: int) -> Column:
        def write(size: int) -> str:
            one = speeds.get((draft, k, size))
            if one is None:
                return MISSING
            each, alone = one["tokens_per_s"], speed_of(results, None, 0, size)
            over = "" if draft is None or alone is None else f"; {number(median(each) / alone)}"
            return f"{number(median(each), 0)} ({spread(each, 0)}){over}"

        return Column("target alone" if draft is None else f"k={k}", write)

    alone = [cell(None, 0)] if any(one["draft"] is None for one in results["speeds"]) else []
    note = "Tokens per second: the median of the rounds, the least to the most, and times the target alone."
    shown = [Column("batch", str), *alone, *(cell(name, k) for k in lengths)]
    return Table(f"Speed in the engine: {name}", shown, sizes, note)


def _our_speeds(results: Mapping[str, Any]) -> Table:
    shown = columns(
        *("draft", "batch", "k"),
        Column("tokens/s", lambda row: f"{number(median(row['drafted']), 0)} ({spread(row['drafted'], 0)})"),
        Column("alone", lambda row: f"{number(median(row['alone']), 0)} ({spread(row['alone'], 0)})"),
        Column("over alone", lambda row: number(median(row["drafted"]) / median(row["alone"]))),
    )
    note = "On the same prompts, one batch of them."
    return Table("Speed of our decoder", shown, results["our_speeds"], note, is_detail=True)
