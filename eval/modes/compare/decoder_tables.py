"""What the page of a comparison of decoders shows: the best settings, a plot against batch size, every table."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from eval.arms.base import AUTOREGRESSIVE, OURS, our_name
from eval.modes.compare.shared_tables import Tried, by_run, choice_table, in_words, ratio_columns
from eval.render.formatting import MISSING, Column, Table, column, columns, number, with_interval
from eval.render.page import Plot
from eval.render.plots import COLORS, GREY, draw
from eval.results.compared import Comparison, TimedCell

_PEER = Column("peer", lambda peer: f"{peer.name} ({peer.version})")
_OVER_PEER = Column("ours / peer", lambda peer: with_interval(peer.ratio_ours_over_peer, peer.ratio_ci95))
_OURS = columns(
    *("batch", "T", "text", "setting", "verifier", "tree", "k", "tau", "tokens/s", "speedup", "predicted", "realised"),
    *("flips when timed", "repeated 4-grams"),
)
_COMPONENTS = columns("batch", "T", "text", "k", "t_target(1)", "t_target(k+1)", "t_draft")
_OVER = {
    "over_transformers": "over transformers generate",
    "over_autoregressive": "over our loop",
    "over_assisted": "over assisted",
    "over_vllm": "over vLLM",
}


def lead(found: Comparison) -> str:
    """The best settings."""
    best = "; ".join(f"batch {one.batch_size}, T={one.temperature:g}: {one.best[OURS]}" for one in found.choices)
    return f"The fastest exact setting, chosen on validation prompts: {best}."


def tables(found: Comparison) -> list[Table]:
    """Every table, in reading order."""
    runs = "runs and batches of prompts; by run is the least and the most of the runs"
    brackets = f"Brackets are 95% intervals over {runs if found.runs else 'batches of prompts'}."
    over = "Speedup is over the faster way without a draft. Plain chains alone are predicted from component times."
    return [
        *(_speeds(found, rows) for rows in dict.fromkeys(cell.batch_size for cell in found.cells)),
        Table(
            "Our chosen setting against the others",
            [
                *columns("batch", "T", "text", _PEER, "tokens/s", _OVER_PEER),
                *by_run(found, lambda one: one.ratio_by_run),
            ],
            found.peers,
            brackets,
        ),
        Table("Our settings", [*_OURS, *by_run(found, lambda row: row.speedup_by_run or [])], found.rows, over),
        Table(
            "Component times",
            _COMPONENTS,
            [row for row in found.rows if row.component_times is not None],
            is_detail=True,
        ),
        _choice_table(found),
        _arm_table(found),
        Table(
            "What our settings are",
            [
                Column("setting", lambda one: one[0]),
                Column("decode.", lambda one: in_words(one[1], "as configured")),
            ],
            list(found.settings.items()),
            is_detail=True,
        ),
    ]


def _best_arms(found: Comparison) -> dict[tuple[int, float], str]:
    """(batch size, temperature) -> the arm of the setting of ours that was chosen there."""
    return {one.point: our_name(one.best[OURS]) for one in found.choices}


def _speeds(found: Comparison, rows: int) -> Table:
    """Every arm's speed by temperature and text at one batch size, and over transformers generate."""
    cells = [cell for cell in found.cells if cell.batch_size == rows]
    arms = sorted(dict.fromkeys(one.arm for cell in cells for one in cell.arms), key=_place)
    best = _best_arms(found)
    speeds = [_speed_column(cell, best[cell.point]) for cell in cells]
    reasons = dict.fromkeys(f"{arm} ({reason})" for cell in cells for arm, reason in cell.left_out.items())
    note = (
        "Tokens per second of the whole batch, and times as fast as transformers generate; * marks the chosen setting."
    )
    note += f" Left out: {'; '.join(reasons)}." if reasons else ""
    return Table(f"Batch {rows}", [Column("arm", str), *speeds], arms, note)


def _speed_column(cell: TimedCell, best: str) -> Column:
    def speed(arm: str) -> str:
        timed = cell.arm(arm)
        if timed is None:
            return MISSING
        over = timed.over("over_transformers")
        return f"{number(timed.tokens_per_s, 0)}{'*' if arm == best else ''}; {with_interval(over.value, over.ci95)}"

    return Column(f"T={cell.temperature:g}, {cell.text}", speed)


def _place(arm: str) -> int:
    """Ours first: the loop, then its settings; then transformers, then vLLM."""
    return next(i for i, start in enumerate((AUTOREGRESSIVE, OURS, "transformers", "")) if arm.startswith(start))


def _arm_table(found: Comparison) -> Table:
    """Every arm of every cell, over those that are asked about."""
    rows = [(cell, one) for cell in found.cells for one in sorted(cell.arms, key=lambda one: _place(one.arm))]
    has_vllm = any("over_vllm" in one.ratios for _, one in rows)
    shown = [
        *(Column(one.header, lambda row, one=one: one.value(row[0])) for one in columns("batch", "T", "text")),
        Column("arm", lambda row: row[1].arm),
        Column("tokens/s", lambda row: number(row[1].tokens_per_s, 1)),
    ]
    for key, header in _OVER.items():
        if key != "over_vllm" or has_vllm:
            shown += ratio_columns(found, header, lambda row, key=key: row[1].over(key))
    return Table("All arms", shown, rows, is_detail=True)


def _choice_table(found: Comparison) -> Table:
    """Of our own choices also how sure they are."""

    def held(figure: str) -> Column:
        def shown(row: Tried) -> str:
            return MISSING if row.held is None or row.arm != OURS else f"{getattr(row.held, figure):.1%}"

        return Column({"share": "chosen again"}.get(figure, figure), shown)

    sure = [held("share"), held("loss")] if any(one.held for one in found.choices) else []
    note = "Tokens per second on validation prompts of both texts; not comparable with the tables above."
    return choice_table(found.choices, ["batch", "T", column("family", "arm"), "chosen", *sure, "tried"], note)


def plot(found: Comparison) -> Plot:
    """Our best setting against batch size."""
    caption = "Times as fast as transformers generate, by prompts decoded at once; the best exact setting of each."
    return Plot(lambda: _batch_plot(found), caption, is_wide=True)


def _batch_plot(found: Comparison) -> str:
    """A panel per kind of text, a colour per temperature: our best setting, and dashed our autoregressive loop."""
    temperatures, best = list(dict.fromkeys(cell.temperature for cell in found.cells)), _best_arms(found)

    def line(axis: Axes, text: str, temperature: float, arm: str | None, style: str, color: str, label: str) -> None:
        cells = [one for one in found.cells if (one.text, one.temperature) == (text, temperature)]
        values = [cell.over(arm or best[cell.point], "over_transformers") for cell in cells]
        axis.plot([cell.batch_size for cell in cells], values, style, marker="o", color=color, label=label)

    def paint(axes: Sequence[Axes]) -> None:
        for axis, text in zip(axes, found.texts, strict=True):
            for temperature, color in zip(temperatures, COLORS, strict=False):
                line(axis, text, temperature, None, "-", color, f"best setting, T={temperature:g}")
                line(axis, text, temperature, AUTOREGRESSIVE, "--", color, f"autoregressive, T={temperature:g}")
            axis.axhline(1, color=GREY, linewidth=1)
            axis.set(xlabel=f"batch size ({text})", ylabel="over transformers generate", ylim=(0, None))

    return draw("speed against batch size", paint, panels=len(found.texts))
