"""What an engine makes of drafts, as a page and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from eval.modes.served.results import Comparison, ServedCounters, ServedResults
from eval.render.formatting import MISSING, Column, Table, column, columns, number, spread, with_interval
from eval.render.page import Page

_NO_SCHEDULE = (
    "Nothing: a schedule takes the target alone and each draft, timed by servers started here in two rounds or "
    "more (served.rounds, served.batch_sizes)."
)


def page_of(results: dict[str, Any]) -> Page:
    """The verdicts, every table, and how it was measured."""
    found = ServedResults.model_validate(results)
    return Page(
        title=f"Drafts served: {found.name}",
        results=results,
        method="served_method.j2",
        lead=_lead(found),
        headline_title="Whether the engine drafts as we do",
        headline=[_said(one) for one in found.comparisons],
        template="served",
        shown={"no_schedule": _NO_SCHEDULE},
        every_table=[_acceptance_table(found), *_speed_tables(found), _our_speeds(found), _lengths(found)],
    )


def _lead(found: ServedResults) -> str:
    """All verdicts in one sentence."""
    engine = f"{found.engine.name} {found.engine.version}".strip()
    parted = [f"{one.draft} at T={one.temperature:g}" for one in found.comparisons if one.verdict == "parted"]
    if not parted:
        return f"{engine} accepts of every draft what our decoder accepts."
    return f"{engine} accepts otherwise than our decoder: {', '.join(parted)}."


def _said(one: Comparison) -> str:
    """A comparison in a sentence, with the faults that would explain it."""
    words = {
        "equal": "counters are equal, prompt by prompt",
        "within intervals": "counters agree within their intervals",
        "parted": "counters part",
    }
    text = (
        f"{one.draft} ({one.form}), T={one.temperature:g}: {words[one.verdict]}: {one.engine.drafts:,} drafts, "
        f"accepted {one.engine.accepted} there; {one.ours.drafts:,} and {one.ours.accepted} here."
    )
    return text + "".join(f" {fault}" for fault in one.faults)


def _lengths(found: ServedResults) -> Table:
    rows = [(one.draft, length) for one in found.schedules for length in one.lengths]
    over = Column("times the target alone", lambda length: with_interval(length.over_alone, length.ci95))
    own = [Column(one.header, lambda row, one=one: one.value(row[1])) for one in columns("batch", "k", over)]
    note = "What is drafted at each batch size, and how much faster that is; brackets are the error bar over rounds."
    return Table("Draft length by batch size", [Column("draft", lambda row: row[0]), *own], rows, note, is_detail=True)


class _Position(NamedTuple):
    draft: str
    temperature: float
    position: int
    engine: str
    ours: str
    verdict: str


def _acceptance_table(found: ServedResults) -> Table:
    def share(counters: ServedCounters, place: int) -> str:
        return with_interval(counters.acceptance_by_position[place], counters.ci95_by_position[place])

    rows = [
        _Position(one.draft, one.temperature, place + 1, share(one.engine, place), share(one.ours, place), one.verdict)
        for one in found.comparisons
        for place in range(one.num_draft_tokens)
    ]
    shown = columns("draft", "T", "position", column("engine's", "engine"), "ours", "verdict")
    return Table("Acceptance by position", shown, rows, "Brackets are 95% intervals over prompts.")


def _speed_tables(found: ServedResults) -> list[Table]:
    """For each draft, its lengths by batch size, over the target alone."""
    sizes = list(dict.fromkeys(one.batch_size for one in found.speeds))
    names = list(dict.fromkeys(one.draft for one in found.speeds if one.draft is not None))
    return [_speed_table(found, name, sizes) for name in names]


def _speed_table(found: ServedResults, name: str, sizes: list[int]) -> Table:
    lengths = sorted({one.num_draft_tokens for one in found.speeds if one.draft == name})

    def cell(draft: str | None, k: int) -> Column:
        def write(size: int) -> str:
            each, alone = found.speed(draft, k, size), found.speed(None, 0, size)
            if each is None:
                return MISSING
            over = "" if draft is None or alone is None else f"; {number(median(each) / median(alone))}"
            return f"{_rounds(each)}{over}"

        return Column("target alone" if draft is None else f"k={k}", write)

    alone = [cell(None, 0)] if any(one.draft is None for one in found.speeds) else []
    note = "Tokens per second: the median of the rounds, the least to the most, and times the target alone."
    shown = [Column("batch", str), *alone, *(cell(name, k) for k in lengths)]
    return Table(f"Speed in the engine: {name}", shown, sizes, note)


def _our_speeds(found: ServedResults) -> Table:
    shown = columns(
        *("draft", "batch", "k"),
        Column("tokens/s", lambda one: _rounds(one.drafted)),
        Column("alone", lambda one: _rounds(one.alone)),
        Column("over alone", lambda one: number(median(one.drafted) / median(one.alone))),
    )
    note = "On the same prompts, one batch of them."
    return Table("Speed of our decoder", shown, found.our_speeds, note, is_detail=True)


def _rounds(speeds: Sequence[float]) -> str:
    """Their median, the least to the most."""
    return f"{number(median(speeds), 0)} ({spread(speeds, 0)})"
