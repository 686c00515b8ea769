"""The comparison of ways to draft as a page and as Markdown: which when, a plot, every arm by text, and the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from matplotlib.axes import Axes

from eval.arms.base import EARLY_EXIT, LOOKUP, PLAIN_ARMS, VLLM_LOOKUP, our_name
from eval.render.formatting import MISSING, Column, Row, Table, by_reason, columns, number, share, spread, with_interval
from eval.render.page import Page, Plot, as_html, as_markdown
from eval.render.plots import COLORS, GREY, draw

_OVER = "over plain"
_BRACKETS = (
    "Over plain is over the faster way without a draft of the same cell; brackets are 95% intervals over batches "
)
_BRACKETS += "of prompts."
_RUNS = _BRACKETS.replace("over batches", "over runs and batches") + " By run is the least and the most of the runs."


def render_page(results: dict[str, Any]) -> str:
    """What is the fastest for which text, a plot, every table, the method, and the definitions."""
    return as_html(_page(results))


def render_summary(results: dict[str, Any], is_published: bool = False) -> str:
    """The same without the plot; published, without details."""
    return as_markdown(_page(results), is_published=is_published)


def _page(results: dict[str, Any]) -> Page:
    texts = _texts(results)
    return Page(
        title=f"Ways to draft compared: {results['name']}",
        results=results,
        method="drafters_method.j2",
        lead="Ways to draft, each on texts of several kinds. With all of ours the text is the target's own, but for "
        "rounding.",
        headline_title="In short",
        headline=[_sentence(results, text) for text in texts],
        plots=[
            Plot(lambda: _plot(results, texts), "Speed over plain decoding by text; a bar is an arm.", is_wide=True)
        ],
        every_table=[
            _which_when_table(results),
            *_over_plain_tables(results, texts),
            *(_text_table(results, text) for text in texts),
            _mixture_table(results),
            _choice_table(results),
            _arm_table(results),
        ],
    )


def _sentence(results: Mapping[str, Any], text: str) -> str:
    """What is the fastest for a text, condition by condition, those of one answer together."""
    conditions: dict[str, list[str]] = {}
    for one in results["which_when"]:
        if one["text"] == text:
            conditions.setdefault(_answer(one), []).append(_condition(one))
    return f"{text}: " + "; ".join(f"{answer} ({', '.join(where)})" for answer, where in conditions.items())


def _answer(one: Row) -> str:
    best, free = one["best"], one["best_without_training"]
    if best is None:
        return "nothing could be timed"
    untrained = "" if free is None or free["arm"] == best["arm"] else f", without training {_one_of(free)}"
    return f"{_one_of(best)}{untrained}"


def _one_of(best: Row) -> str:
    """An arm, with those that are as good."""
    return " or ".join(map(_named, [best["arm"], *(best["as_good"] or [])]))


def _named(arm: str) -> str:
    return "no draft" if arm in PLAIN_ARMS else arm


def _condition(one: Row) -> str:
    over = "" if one["best"] is None else f": {number(one['best']['over_plain'])} times plain"
    return f"batch {one['batch_size']}, T={one['temperature']:g}{over}"


def _which_when_table(results: Mapping[str, Any]) -> Table:
    best = [*_picked("best", "best"), *_picked("without training", "best_without_training")]
    note = (
        "As good: arms that the same batches do not tell from the best one. No draft: the faster of our autoregressive"
    )
    note += " loop and transformers generate."
    return Table("Which when", columns("text", "batch", "T", *best), _by_text(results, "which_when"), note)


def _by_text(results: Mapping[str, Any], key: str) -> list[Row]:
    """Entries, those of a text together."""
    texts = _texts(results)
    return sorted(results[key], key=lambda one: texts.index(one["text"]))


def _texts(results: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(cell["text"] for cell in results["cells"]))


def _picked(header: str, key: str) -> list[Column]:
    def of(one: Row, write: Any) -> str:
        return MISSING if one[key] is None else write(one[key])

    return [
        Column(header, lambda one: of(one, lambda best: _named(best["arm"]))),
        Column(_OVER, lambda one: of(one, lambda best: with_interval(best["over_plain"], best["over_plain_ci95"]))),
        Column("as good", lambda one: of(one, _as_good)),
    ]


def _as_good(best: Row) -> str:
    if best["as_good"] is None:
        return "unknown: too few batches"
    return ", ".join(map(_named, best["as_good"])) or "none"


def _over_plain_tables(results: Mapping[str, Any], texts: Sequence[str]) -> list[Table]:
    """For each batch size and temperature, arms by texts; published of the smallest batch alone."""
    about, of_arm = (
        itemgetter("batch_size", "temperature", "text"),
        itemgetter("shown", "over_plain", "over_plain_ci95"),
    )
    over: dict[tuple[int, float], dict[str, dict[str, str]]] = {}
    for cell in results["cells"]:
        *place, text = about(cell)
        for arm in _arms_of(results, cell):
            name, ratio, interval = of_arm({"over_plain": None, "over_plain_ci95": None, **arm})
            by_text = over.setdefault((place[0], place[1]), {}).setdefault(name, dict.fromkeys(texts, MISSING))
            by_text[text] = with_interval(ratio, interval)
    tables = []
    for place, arms in over.items():
        rows = [{"arm": name, **by_text} for name, by_text in arms.items()]
        title = f"Over plain: batch {place[0]}, T={place[1]:g}"
        is_detail = place[0] > min(rows for rows, _ in over)
        tables.append(Table(title, columns("arm", *texts), rows, _BRACKETS, is_detail=is_detail))
    return tables


def _text_table(results: Mapping[str, Any], text: str) -> Table:
    """Every arm of a text's cells, the fastest of a cell first."""
    cells = [cell for cell in results["cells"] if cell["text"] == text]
    rows = [row for cell in cells for row in _arms_of(results, cell)]
    by_run = [Column("by run", lambda row: spread(row.get("over_plain_by_run") or [], 2))] if "runs" in results else []
    shown = [
        *columns("batch", "T", Column("arm", lambda row: row["shown"]), Column("setting", lambda row: row["setting"])),
        Column("tokens/s", lambda row: number(row["tokens_per_s"], 0)),
        Column(_OVER, lambda row: with_interval(row.get("over_plain"), row.get("over_plain_ci95"))),
        *by_run,
        Column("tokens per round", lambda row: number(row["tau"])),
        Column("acceptance", lambda row: share(row["acceptance"])),
    ]
    target = next(one["path"] for one in results["targets"] if text in one["texts"])
    reasons = by_reason({arm: reason for cell in cells for arm, reason in cell["left_out"].items()})
    note = f"Written by {target}. {_RUNS if 'runs' in results else _BRACKETS}"
    return Table(f"Text: {text}", shown, rows, note + (f" Left out: {reasons}." if reasons else ""), is_detail=True)


def _arms_of(results: Mapping[str, Any], cell: Mapping[str, Any]) -> list[Row]:
    rows = {our_name(row["setting"]): row for row in results["rows"] if _is_about(row, cell)}
    names = {our_name(name): name for name in results["arms"]}
    each = [
        {
            **cell,
            **arm,
            "shown": names.get(arm["arm"], arm["arm"]),
            "setting": cell["settings"].get(names.get(arm["arm"], arm["arm"]), MISSING),
            "tau": rows[arm["arm"]]["tau"] if arm["arm"] in rows else None,
            "acceptance": _acceptance(rows.get(arm["arm"])),
        }
        for arm in cell["arms"]
    ]
    return sorted(each, key=lambda row: -(row["tokens_per_s"] or 0.0))


def _is_about(row: Row, cell: Row) -> bool:
    return all(row[key] == cell[key] for key in ("text", "batch_size", "temperature"))


def _acceptance(row: Row | None) -> float | None:
    """Of the first draft token of a round."""
    return None if row is None else next(iter(row["acceptance_by_position"]), None)


def _mixture_table(results: Mapping[str, Any]) -> Table:
    ratio = Column("mixture / member", lambda one: with_interval(one["over_member"], one["over_member_ci95"]))
    mixture, member = Column("mixture", lambda one: one["arm"]), Column("best member", lambda one: one["member"])
    wanted = columns("text", "batch", "T", mixture, member)
    note = "Over the fastest arm that drafts with one of its members alone; above 1 the mixture is faster."
    rows = _by_text(results, "mixtures")
    return Table("A mixture against its best member", [*wanted, ratio], rows, note, is_detail=True)


def _choice_table(results: Mapping[str, Any]) -> Table:
    """Every setting tried, on validation prompts; the fastest of each arm first."""
    rows = []
    for one in _by_text(results, "choices"):
        for arm, speeds in one["tokens_per_s"].items():
            ranked = sorted(speeds, key=lambda name: -(speeds[name] or 0.0))
            tried = ", ".join(f"{name} {number(speeds[name], 0)}" for name in ranked)
            rows.append({**one, "arm": arm, "chosen": one["best"][arm], "tried": tried})
    note = "Tokens per second on prompts that are not reported; not comparable with the tables above."
    return Table("Settings tried", columns("text", "batch", "T", "arm", "chosen", "tried"), rows, note, is_detail=True)


def _arm_table(results: Mapping[str, Any]) -> Table:
    """What the names of our arms stand for."""
    rows = [
        {
            "arm": name,
            "draft": one["draft"],
            "settings": _in_words(one["settings"]) or MISSING,
            "decode.": _in_words(one["changes"]) or "as configured",
            "texts": ", ".join(one["texts"]),
        }
        for name, one in results["arms"].items()
    ]
    return Table("What our arms are", columns("arm", "draft", "settings", "decode.", "texts"), rows, is_detail=True)


def _in_words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in changes.items())


def _plot(results: Mapping[str, Any], texts: Sequence[str]) -> str:
    """A panel per batch size and temperature, the arms of each text side by side."""
    cells = {(cell["batch_size"], cell["temperature"], cell["text"]): cell for cell in results["cells"]}
    places = list(dict.fromkeys(place[:2] for place in cells))
    arms = [*map(our_name, results["arms"]), LOOKUP, EARLY_EXIT, VLLM_LOOKUP]

    def paint(axes: Sequence[Axes]) -> None:
        for axis, (rows, temperature) in zip(axes, places, strict=True):
            for place, arm in enumerate(arms):
                heights = [_over_plain(cells[rows, temperature, text], arm) for text in texts]
                spots = [group - 0.4 + 0.8 * (place + 0.5) / len(arms) for group in range(len(texts))]
                label = next((name for name in results["arms"] if our_name(name) == arm), arm)
                look: dict[str, Any] = {
                    "color": COLORS[place % len(COLORS)],
                    "alpha": 0.5 if place >= len(COLORS) else 1,
                }
                axis.bar(spots, heights, 0.8 / len(arms), label=label, **look)
            axis.axhline(1, color=GREY, linewidth=1)
            axis.set_xticks(range(len(texts)), texts)
            axis.set(xlabel=f"batch {rows}, T={temperature:g}", ylabel=_OVER, ylim=(0, None))

    return draw("speed over plain decoding by text", paint, panels=len(places))


def _over_plain(cell: Mapping[str, Any], arm: str) -> float:
    value = next((one.get("over_plain") for one in cell["arms"] if one["arm"] == arm), None)
    return float("nan") if value is None else value
