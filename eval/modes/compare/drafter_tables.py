"""What the page of a comparison of ways to draft shows: which when, a plot, every arm by text, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from matplotlib.axes import Axes

from eval.arms.base import EARLY_EXIT, LOOKUP, PLAIN_ARMS, VLLM_LOOKUP, our_name
from eval.modes.compare.shared_tables import choice_table, in_words, ratio_columns
from eval.render.formatting import MISSING, Column, Table, by_reason, column, columns, number, share, with_interval
from eval.render.page import Plot
from eval.render.plots import COLORS, GREY, draw
from eval.results.compared import Answer, Best, Comparison, Place, Ratio, TimedCell

_OVER = "over plain"
Entry = TypeVar("Entry", bound=Place)


def sentence(found: Comparison, text: str) -> str:
    """What is the fastest for a text, condition by condition, those of one answer together."""
    conditions: dict[str, list[str]] = {}
    for one in found.which_when:
        if one.text == text:
            conditions.setdefault(_answer(one), []).append(_condition(one))
    return f"{text}: " + "; ".join(f"{answer} ({', '.join(where)})" for answer, where in conditions.items())


def _answer(one: Answer) -> str:
    best, free = one.best, one.best_without_training
    if best is None:
        return "nothing could be timed"
    untrained = "" if free is None or free.arm == best.arm else f", without training {_one_of(free)}"
    return f"{_one_of(best)}{untrained}"


def _one_of(best: Best) -> str:
    """An arm, with those that are as good."""
    return " or ".join(map(_named, [best.arm, *(best.as_good or [])]))


def _named(arm: str) -> str:
    return "no draft" if arm in PLAIN_ARMS else arm


def _condition(one: Answer) -> str:
    over = "" if one.best is None else f": {number(one.best.over_plain)} times plain"
    return f"batch {one.batch_size}, T={one.temperature:g}{over}"


def tables(found: Comparison) -> list[Table]:
    """Every table, in reading order."""
    note = "Tokens per second on prompts that are not reported; not comparable with the tables above."
    return [
        _which_when_table(found),
        *(_over_plain_table(found, *point) for point in found.points),
        *(_text_table(found, text) for text in found.texts),
        _mixture_table(found),
        choice_table(_by_text(found, found.choices), ["text", "batch", "T", "arm", "chosen", "tried"], note),
        _arm_table(found),
    ]


def _by_text(found: Comparison, entries: Sequence[Entry]) -> list[Entry]:
    """Entries, those of a text together."""
    return sorted(entries, key=lambda one: found.texts.index(one.text or ""))


def _which_when_table(found: Comparison) -> Table:
    best = [*_picked("best", lambda one: one.best), *_picked("without training", lambda one: one.best_without_training)]
    note = (
        "As good: arms that the same batches do not tell from the best one. No draft: the faster of our autoregressive "
        "loop and transformers generate."
    )
    return Table("Which when", columns("text", "batch", "T", *best), _by_text(found, found.which_when), note)


def _picked(header: str, best_of: Callable[[Answer], Best | None]) -> list[Column]:
    def of(write: Callable[[Best], str]) -> Callable[[Answer], str]:
        return lambda one: MISSING if (best := best_of(one)) is None else write(best)

    return [
        Column(header, of(lambda best: _named(best.arm))),
        Column(_OVER, of(lambda best: with_interval(best.over_plain, best.over_plain_ci95))),
        Column("as good", of(_as_good)),
    ]


def _as_good(best: Best) -> str:
    if best.as_good is None:
        return "unknown: too few batches"
    return ", ".join(map(_named, best.as_good)) or "none"


class ShownArm(NamedTuple):
    """An arm of a cell, as tables show it."""

    batch_size: int
    temperature: float
    arm: str
    setting: str
    tokens_per_s: float | None
    over_plain: Ratio
    tau: float | None
    acceptance: float | None
    """Of the first draft token of a round."""


def arms_of(found: Comparison, cell: TimedCell) -> list[ShownArm]:
    """All of a cell, the fastest first."""
    here = [row for row in found.rows if Place.model_validate(row, from_attributes=True) == cell.place]
    rows = {our_name(row.setting or ""): row for row in here}
    names = {our_name(name): name for name in found.arms}
    each = []
    for one in cell.arms:
        name, row = names.get(one.arm, one.arm), rows.get(one.arm)
        tau, acceptance = (None, []) if row is None else (row.tau, row.acceptance_by_position)
        setting, over = cell.settings.get(name, MISSING), one.over("over_plain")
        first = next(iter(acceptance), None)
        each.append(ShownArm(*cell.point, name, setting, one.tokens_per_s, over, tau, first))
    return sorted(each, key=lambda arm: -(arm.tokens_per_s or 0.0))


def _brackets(over: str) -> str:
    return (
        "Over plain is over the faster way without a draft of the same cell; brackets are 95% intervals over "
        f"{over} of prompts."
    )


def _over_plain_table(found: Comparison, batch_size: int, temperature: float) -> Table:
    """Arms by texts; published of the smallest batch alone."""
    over: dict[str, dict[str, str]] = {}
    for cell in found.cells:
        for one in arms_of(found, cell) if cell.point == (batch_size, temperature) else ():
            over.setdefault(one.arm, {})[cell.text] = with_interval(one.over_plain.value, one.over_plain.ci95)
    shown = [
        Column("arm", str),
        *(Column(text, lambda arm, text=text: over[arm].get(text, MISSING)) for text in found.texts),
    ]
    title = f"Over plain: batch {batch_size}, T={temperature:g}"
    is_detail = batch_size > min(rows for rows, _ in found.points)
    return Table(title, shown, list(over), _brackets("batches"), is_detail=is_detail)


def _text_table(found: Comparison, text: str) -> Table:
    """Every arm of a text's cells, the fastest of a cell first."""
    cells = [cell for cell in found.cells if cell.text == text]
    shown = [
        *columns("batch", "T", "arm", "setting", "tokens/s"),
        *ratio_columns(found, _OVER, lambda arm: arm.over_plain),
        column("tokens per round", "tau", number),
        column("acceptance", write=share),
    ]
    target = next(one.path for one in found.targets if text in one.texts)
    reasons = by_reason({arm: reason for cell in cells for arm, reason in cell.left_out.items()})
    runs = f"{_brackets('runs and batches')} By run is the least and the most of the runs."
    note = f"Written by {target}. {runs if found.runs else _brackets('batches')}"
    note += f" Left out: {reasons}." if reasons else ""
    return Table(f"Text: {text}", shown, [arm for cell in cells for arm in arms_of(found, cell)], note, is_detail=True)


def _mixture_table(found: Comparison) -> Table:
    ratio = Column("mixture / member", lambda one: with_interval(one.over_member, one.over_member_ci95))
    wanted = columns("text", "batch", "T", column("mixture", "arm"), column("best member", "member"), ratio)
    note = "Over the fastest arm that drafts with one of its members alone; above 1 the mixture is faster."
    rows = _by_text(found, found.mixtures)
    return Table("A mixture against its best member", wanted, rows, note, is_detail=True)


def _arm_table(found: Comparison) -> Table:
    """What the names of our arms stand for."""
    shown = [
        Column("arm", lambda one: one[0]),
        Column("draft", lambda one: one[1].draft),
        Column("settings", lambda one: in_words(one[1].settings)),
        Column("decode.", lambda one: in_words(one[1].changes, "as configured")),
        Column("texts", lambda one: ", ".join(one[1].texts)),
    ]
    return Table("What our arms are", shown, list(found.arms.items()), is_detail=True)


def plot(found: Comparison) -> Plot:
    """Speed by text."""
    return Plot(lambda: _bars(found), "Speed over plain decoding by text; a bar is an arm.", is_wide=True)


def _bars(found: Comparison) -> str:
    """A panel per batch size and temperature, the arms of each text side by side."""
    cells, texts = {(cell.point, cell.text): cell for cell in found.cells}, found.texts
    names = {our_name(name): name for name in found.arms} | {peer: peer for peer in (LOOKUP, EARLY_EXIT, VLLM_LOOKUP)}

    def paint(axes: Sequence[Axes]) -> None:
        for axis, point in zip(axes, found.points, strict=True):
            for place, (arm, label) in enumerate(names.items()):
                heights = [cells[point, text].over(arm, "over_plain") for text in texts]
                spots = [group - 0.4 + 0.8 * (place + 0.5) / len(names) for group in range(len(texts))]
                look: dict[str, Any] = {
                    "color": COLORS[place % len(COLORS)],
                    "alpha": 0.5 if place >= len(COLORS) else 1,
                }
                axis.bar(spots, heights, 0.8 / len(names), label=label, **look)
            axis.axhline(1, color=GREY, linewidth=1)
            axis.set_xticks(range(len(texts)), texts)
            axis.set(xlabel=f"batch {point[0]}, T={point[1]:g}", ylabel=_OVER, ylim=(0, None))

    return draw("speed over plain decoding by text", paint, panels=len(found.points))
