"""The comparison of decoders as a page and as Markdown: the best settings, a plot against batch size, every table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from eval.arms.base import AUTOREGRESSIVE, OURS, VLLM, is_vllm, our_name
from eval.modes.compare.peers import ISSUE
from eval.render.formatting import MISSING, Column, Row, Table, columns, number, spread, with_interval
from eval.render.page import Page, Plot, as_html, as_markdown
from eval.render.plots import COLORS, GREY, draw

_PEER = Column("peer", lambda peer: f"{peer['name']} ({peer['version']})")
_PEERS = columns("batch", "T", "text", _PEER, "tokens/s", "ours / peer")
_OURS = columns(
    *("batch", "T", "text", "setting", "verifier", "tree", "k", "tau", "tokens/s", "speedup", "predicted", "realised"),
    *("flips when timed", "repeated 4-grams"),
)
_COMPONENTS = columns("batch", "T", "text", "k", "t_target(1)", "t_target(k+1)", "t_draft")
_ARMS = columns("batch", "T", "text", "arm", Column("tokens/s", lambda arm: number(arm["tokens_per_s"], 1)))
_OVER = {
    "over_transformers": "over transformers generate",
    "over_autoregressive": "over our loop",
    "over_assisted": "over assisted",
    "over_vllm": "over vLLM",
}
_BATCHES = "Brackets are 95% intervals over batches of prompts."
_RUNS = " over runs and batches of prompts; by run is the least and the most of the runs."
_TOO_FEW = (
    " vLLM with a draft at temperatures above 0 is no comparison here: its CPU build read temperatures from memory "
    "that nothing had written (vLLM issue 55005), wrote other texts and accepted fewer tokens. Later runs replace that."
)


def decoder_tables(results: dict[str, Any]) -> list[Table]:
    """Every table, in reading order."""
    predicted = [row for row in results["rows"] if row["component_times"] is not None]
    over = "Speedup is over the faster way without a draft. Plain chains alone are predicted from component times."
    brackets = _BATCHES.replace(" over batches of prompts.", _RUNS) if "runs" in results else _BATCHES
    return [
        *(_speeds(results, rows) for rows in dict.fromkeys(cell["batch_size"] for cell in results["cells"])),
        Table(
            "Our chosen setting against the others",
            [*_PEERS, *_by_run(results, "ratio_by_run")],
            results["peers"],
            brackets + _vllm_note(results),
        ),
        Table("Our settings", [*_OURS, *_by_run(results, "speedup_by_run")], results["rows"], over),
        Table("Component times", _COMPONENTS, predicted, is_detail=True),
        _choice_table(results),
        _arm_table(results),
        _settings_table(results),
    ]


def best_arms(results: dict[str, Any]) -> dict[tuple[int, float], str]:
    """(batch size, temperature) -> the arm of the setting of ours that was chosen there."""
    return {(one["batch_size"], one["temperature"]): our_name(one["best"][OURS]) for one in results["choices"]}


def _speeds(results: dict[str, Any], rows: int) -> Table:
    """Every arm's speed by temperature and text at one batch size, and over transformers generate."""
    cells = [cell for cell in results["cells"] if cell["batch_size"] == rows]
    arms = sorted(dict.fromkeys(one["arm"] for cell in cells for one in cell["arms"]), key=_place)
    best = best_arms(results)
    speeds = [_speed_column(cell, best[rows, cell["temperature"]]) for cell in cells]
    reasons = dict.fromkeys(f"{arm} ({reason})" for cell in cells for arm, reason in cell["left_out"].items())
    note = (
        "Tokens per second of the whole batch, and times as fast as transformers generate; * marks the chosen setting."
    )
    note += f" Left out: {'; '.join(reasons)}." if reasons else ""
    return Table(f"Batch {rows}", [Column("arm", str), *speeds], arms, note + _vllm_note(results))


def _vllm_note(results: dict[str, Any]) -> str:
    """Of runs whose definitions do not speak of the fault, which were made before it was known."""
    arms = {one["arm"] for cell in results["cells"] if cell["temperature"] > 0 for one in cell["arms"]}
    is_touched = any(is_vllm(arm) and arm != VLLM for arm in arms)
    return _TOO_FEW if is_touched and ISSUE not in results["definitions"]["vllm"] else ""


def _speed_column(cell: dict[str, Any], best: str) -> Column:
    arms = {one["arm"]: one for one in cell["arms"]}

    def speed(arm: str) -> str:
        if arm not in arms:
            return MISSING
        over = with_interval(arms[arm]["over_transformers"], arms[arm]["over_transformers_ci95"])
        return f"{number(arms[arm]['tokens_per_s'], 0)}{'*' if arm == best else ''}; {over}"

    return Column(f"T={cell['temperature']:g}, {cell['text']}", speed)


def _place(arm: str) -> int:
    """Ours first: the loop, then its settings; then transformers, then vLLM."""
    return next(i for i, start in enumerate((AUTOREGRESSIVE, OURS, "transformers", "")) if arm.startswith(start))


def _arm_table(results: dict[str, Any]) -> Table:
    """Every arm of every cell, over those that are asked about."""
    rows: list[Row] = [
        {**cell, **one} for cell in results["cells"] for one in sorted(cell["arms"], key=lambda one: _place(one["arm"]))
    ]
    ratios = [key for key in _OVER if key != "over_vllm" or any(key in row for row in rows)]
    return Table("All arms", [*_ARMS, *(one for key in ratios for one in _ratio(results, key))], rows, is_detail=True)


def _ratio(results: dict[str, Any], key: str) -> list[Column]:
    """Of every arm, with its interval, and of several runs the least and the most."""
    over = Column(_OVER[key], lambda arm: with_interval(arm.get(key), arm.get(f"{key}_ci95")))
    return [over, *_by_run(results, f"{key}_by_run")]


def _by_run(results: dict[str, Any], key: str) -> list[Column]:
    return [Column("by run", lambda row: spread(row.get(key) or [], 2))] if "runs" in results else []


def _choice_table(results: dict[str, Any]) -> Table:
    """Every setting tried, on validation prompts; the best of each family first."""
    rows = []
    for one in results["choices"]:
        for family, speeds in one["tokens_per_s"].items():
            ranked = sorted(speeds, key=lambda name: -(speeds[name] or 0.0))
            tried = ", ".join(f"{name} {number(speeds[name], 0)}" for name in ranked)
            held = one.get("held") if family == OURS else None
            rows.append({**one, "family": family, "chosen": one["best"][family], "tried": tried, "held": held})
    note = "Tokens per second on validation prompts of both texts; not comparable with the tables above."
    chosen = ["family", "chosen", *(_HELD if any(row["held"] for row in rows) else ()), "tried"]
    return Table("Settings tried", columns("batch", "T", *chosen), rows, note, is_detail=True)


def _held(row: Row, figure: str) -> str:
    return MISSING if row["held"] is None else f"{row['held'][figure]:.1%}"


_HELD = (Column("chosen again", lambda row: _held(row, "share")), Column("loss", lambda row: _held(row, "loss")))


def _settings_table(results: dict[str, Any]) -> Table:
    """What the names of our settings stand for."""
    rows = [
        {"setting": name, "decode.": ", ".join(f"{key}={value}" for key, value in changes.items()) or "as configured"}
        for name, changes in results["settings"].items()
    ]
    return Table("What our settings are", columns("setting", "decode."), rows, is_detail=True)


def render_page(results: dict[str, Any]) -> str:
    """The best settings, a plot of speed against batch size, every table, the method, and the definitions."""
    return as_html(_page(results))


def render_summary(results: dict[str, Any], is_published: bool = False) -> str:
    """The same without the plot; published, without details."""
    return as_markdown(_page(results), is_published=is_published)


def _page(results: dict[str, Any]) -> Page:
    best = "; ".join(
        f"batch {one['batch_size']}, T={one['temperature']:g}: {one['best'][OURS]}" for one in results["choices"]
    )
    caption = "Times as fast as transformers generate, by prompts decoded at once; the best exact setting of each."
    return Page(
        title=f"Decoders compared: {results['name']}",
        results=results,
        method="decoders_method.j2",
        lead=f"The fastest exact setting, chosen on validation prompts: {best}.",
        plots=[Plot(lambda: _batch_plot(results), caption, is_wide=True)],
        every_table=decoder_tables(results),
    )


def _batch_plot(results: dict[str, Any]) -> str:
    """A panel per kind of text, a colour per temperature: our best setting, and dashed our autoregressive loop."""
    texts = list(dict.fromkeys(cell["text"] for cell in results["cells"]))
    temperatures = list(dict.fromkeys(cell["temperature"] for cell in results["cells"]))
    best = best_arms(results)

    def line(axis: Axes, text: str, temperature: float, arm: str | None, style: str, color: str, label: str) -> None:
        cells = [c for c in results["cells"] if (c["text"], c["temperature"]) == (text, temperature)]
        values = [_over(cell, arm or best[cell["batch_size"], temperature]) for cell in cells]
        axis.plot([c["batch_size"] for c in cells], values, style, marker="o", color=color, label=label)

    def paint(axes: Sequence[Axes]) -> None:
        for axis, text in zip(axes, texts, strict=True):
            for temperature, color in zip(temperatures, COLORS, strict=False):
                line(axis, text, temperature, None, "-", color, f"best setting, T={temperature:g}")
                line(axis, text, temperature, AUTOREGRESSIVE, "--", color, f"autoregressive, T={temperature:g}")
            axis.axhline(1, color=GREY, linewidth=1)
            axis.set(xlabel=f"batch size ({text})", ylabel="over transformers generate", ylim=(0, None))

    return draw("speed against batch size", paint, panels=len(texts))


def _over(cell: dict[str, Any], arm: str) -> float:
    value = next((one["over_transformers"] for one in cell["arms"] if one["arm"] == arm), None)
    return float("nan") if value is None else value
