"""When drafting ahead pays, as a page and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from eval.modes.overlap.simulation import WAYS
from eval.render.formatting import Column, Table, column, columns, count, estimate, number, share, short, with_interval
from eval.render.page import Page, Plot, as_html, as_markdown
from eval.render.plots import COLORS, GREY, draw

_GAIN = 1.02
"""A gain below that is none: the simulation leaves out what threads and copies cost."""
Entry = Mapping[str, Any]


def render_page(results: dict[str, Any]) -> str:
    """With a plot of every pair's gain by latency."""
    return as_html(_page(results))


def render_summary(results: dict[str, Any]) -> str:
    """The same as Markdown, without it."""
    return as_markdown(_page(results))


def _page(results: dict[str, Any]) -> Page:
    return Page(
        title=f"Drafting while the target verifies, simulated: {results['name']}",
        results=results,
        method="overlap_method.j2",
        lead="Each way at the draft length that is best for it. Simulated, not run: threads, copies between devices "
        "and the decoder's own work are left out.",
        headline_title="When it pays",
        headline=[_sentence(results, pair["name"]) for pair in results["pairs"]],
        every_table=[_speedups(results), _times(results)],
        plots=[Plot(lambda: _gains(results), "Speed of drafting ahead over that of drafting in turn, by latency")],
    )


def _of(results: Mapping[str, Any], pair: str) -> list[Entry]:
    return [one for one in results["simulated"] if one["pair"] == pair]


def _sentence(results: Mapping[str, Any], pair: str) -> str:
    """What one pair gains, and at which links."""
    found = _of(results, pair)
    best = max(found, key=lambda one: one["ahead_over_in_turn"])
    if best["ahead_over_in_turn"] < _GAIN:
        return f"{pair}: it pays at none of these links, the most is {number(best['ahead_over_in_turn'])} times."
    paying = [short(one["link_ms"]) for one in found if one["ahead_over_in_turn"] >= _GAIN]
    way = best["ways"]["ahead"]
    return (
        f"{pair}: the most is {with_interval(best['ahead_over_in_turn'], best['ahead_over_in_turn_ci95'])} times the "
        f"speed of drafting in turn, at {short(best['link_ms'])} ms a way ({number(way['speedup'])} times plain "
        f"decoding); it pays at {', '.join(paying)} ms."
    )


def _way(way: str, header: str, key: str, write: Any) -> Column:
    return Column(f"{way}: {header}", lambda one: write(one["ways"][way][key]))


def _over_plain(way: str) -> Column:
    return Column(
        f"{way}: speedup", lambda one: with_interval(one["ways"][way]["speedup"], one["ways"][way]["speedup_ci95"])
    )


def _speedups(results: Mapping[str, Any]) -> Table:
    shown = columns(
        "pair",
        column("link ms", "link_ms", short),
        *(one for way in WAYS for one in (_way(way, "k", "num_draft_tokens", str), _over_plain(way))),
        _way("ahead", "foreseen", "foreseen", share),
        estimate("ahead / in turn", "ahead_over_in_turn"),
    )
    note = "Speedups are over the target without a draft. Brackets are 95% intervals over blocks of simulated rounds."
    return Table("Speedups", shown, results["simulated"], note)


def _times(results: Mapping[str, Any]) -> Table:
    milliseconds = (column(f"{part} ms", f"{part}_ms", short) for part in ("target", "token", "draft"))
    accepted = Column("acceptance", lambda pair: ", ".join(number(one) for one in pair["acceptance"]))
    shown = columns(column("pair", "name"), *milliseconds, accepted, column("batch", "batch_size"))
    note = (
        "A pass over k + 1 tokens takes target + k x token ms, 0 where a report measured it no slower than a pass over "
        "one; the last acceptance stands for all positions behind."
    )
    return Table(f"What was simulated: {count(len(results['pairs']), 'pair')}", shown, results["pairs"], note)


def _gains(results: Mapping[str, Any]) -> str:
    def paint(axes: Sequence[Axes]) -> None:
        (axis,) = axes
        for place, pair in enumerate(results["pairs"]):
            found = _of(results, pair["name"])
            links = [one["link_ms"] for one in found]
            gains = [one["ahead_over_in_turn"] for one in found]
            axis.plot(links, gains, "o-", color=COLORS[place % len(COLORS)], label=pair["name"])
        axis.axhline(1, color=GREY, linewidth=1)
        axis.set_xscale("symlog", linthresh=0.05)
        axis.set_xlim(left=0)
        axis.set_xlabel("ms between the devices, one way")
        axis.set_ylabel("ahead / in turn")

    return draw("gains", paint)
