"""A report as a page and as Markdown: headline, plots and every table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from eval.render.formatting import (
    MISSING,
    NAMED,
    Column,
    Table,
    column,
    columns,
    estimate,
    number,
    setting,
    size,
    thousands,
    whole,
)
from eval.render.page import Page, Plot, render_markdown
from eval.render.plots import Curves, acceptance_plot, draft_length_plot, temperature_plot, training_plot
from eval.render.pooled import SHORT, baselines, runs_table, short_rows, side_by_side, sides
from eval.render.remarks import ONE_PROCESS, remarks
from eval.results.headline import headline_row, over_peer
from eval.results.reported import Report
from eval.results.schema import Row

_SPEED = columns(
    *("T", NAMED, "k", "alpha", "tau", "tokens/s", "baseline", "speedup", "whole call", "predicted", "realised")
)
_EXACTNESS = columns(
    *("T", NAMED, "verifier", "mismatches", "near-ties", "in tokens", "flips when timed", "repeated 4-grams"),
    *("ttft", "itl p50", "itl p95", "memory"),
)
_PEER = Column("peer", lambda peer: f"{peer.name} {peer.version}")
_PEERS = columns("T", _PEER, Column("best setting", setting), "tokens/s", "ours / peer")
_UNQUANTISED = columns(
    *("T", NAMED, "k", "tokens/s"),
    *(column("unquantised, plain", "unquantised_tokens_per_s", whole), estimate("ratio")),
)
_TRIED = columns("T", Column("setting", setting), "tokens/s")
_CATEGORIES = columns("category", "T", NAMED, "prompts", "alpha", "tau", "speedup")
_BY_CONTEXT = columns(
    *("T", NAMED, Column("context", lambda row: f"{row.context_from:,} to {row.context_below - 1:,}")),
    *(column("prompts", write=thousands), column("passes", write=thousands), "tau"),
)
_LENGTHS = columns("k", column("tau", write=number), "tokens/s", "speedup", "predicted", "realised")
_CURVE = columns(
    *("T", "draft", Column("alpha", lambda point: number(point.alpha, 3))),
    *(column("expected tau", "tau", number), column("predicted speedup", "predicted_speedup", number)),
)
_ARMS = columns("T", "arm", Column("tokens/s", lambda arm: number(arm.tokens_per_s, 1)))


def _uncached_flips(row: Row) -> str:
    flips, tokens = row.uncached_dtype_flips, row.uncached_dtype_tokens
    if flips is None:
        return MISSING
    return f"{flips:,} in {tokens:,} ({100 * flips / max(tokens, 1):.2f}%, {row.dtype})"


_UNCACHED = columns(
    *("T", NAMED, column("mismatches", "uncached_mismatches", thousands)),
    *(column("near-ties", "uncached_near_ties", thousands), column("in tokens", "uncached_tokens_checked", thousands)),
    Column("flips when timed", _uncached_flips),
)


def main_table(results: Report) -> Table:
    """Speed and acceptance over all prompts."""
    over = "runs and prompts" if results.runs else "prompts"
    return Table("Results", _SPEED, results.overall, f"Brackets are 95% intervals over {over}.")


def report_tables(results: Report) -> list[Table]:
    """Every table, in reading order."""
    row = headline_row(results)
    runs = [runs_table(results, sides(results, row))] if row is not None and results.runs else []
    first = [main_table(results), *runs]
    return [*first, *_tables_of_exactness(results), *_tables_of_sweeps(results), *_tables_of_arms(results)]


def _tables_of_exactness(results: Report) -> list[Table]:
    rows, peers = results.overall, [peer for peer in results.peers if peer.best]
    left_out = f"Left out: {results.peers_left_out}." if results.peers_left_out else ""
    energy = f"Energy: {rows[0].energy_reason}." if rows and results.energy is None else ""
    uncached = [row for row in rows if row.uncached_tokens_checked or row.uncached_dtype_tokens]
    apart = "What both of our loops get wrong alike shows here: this forward has neither cache nor masks of ours."
    return [
        Table("Against transformers assisted generation", _PEERS, peers, left_out, reason=left_out),
        _unquantised_table(results),
        Table("Exactness and latency", _EXACTNESS, rows, energy),
        Table("Against an uncached forward", _UNCACHED, uncached, apart),
        Table("By length of the context", _BY_CONTEXT, _by_context(results.rows), "In tokens, prompt included."),
        Table("By category", _CATEGORIES, [row for row in results.rows if row.category is not None]),
    ]


def _unquantised_table(results: Report) -> Table:
    rows = results.unquantised
    note = ""
    if rows:
        one = rows[0]
        note = (
            f"Drafts on the {results.target.quantization} target over the target before it was quantised, "
            f"without a draft: another model's text. Ratio: the draft's speed over that one's. KL {one.kl:.2g} "
            f"nats, total variation {number(one.tv, 3)} "
            f"and {100 * one.argmax_agreement:.1f}% equal argmaxes at {one.positions:,} positions."
        )
    return Table("Against the unquantised target", _UNQUANTISED, rows, note)


def _by_context(rows: Sequence[Row]) -> list[Row]:
    """A line for each bucket, of the rows that have more than one: the row with the bucket's figures."""
    overall = [row for row in rows if row.category is None and len(row.tau_by_context or ()) > 1]
    return [row.model_copy(update=dict(one)) for row in overall for one in row.tau_by_context or ()]


def _tables_of_sweeps(results: Report) -> list[Table]:
    lengths, curve = results.sweeps.num_draft_tokens, results.sweeps.temperature
    title = f"Draft length ({lengths.draft}, T={lengths.temperature:g})"
    promised = "Teacher-forced. tau is what alpha promises; the coupled verifier accepts slightly less."
    return [Table(title, _LENGTHS, lengths.points), Table("Temperature", _CURVE, curve.points, promised)]


def _tables_of_arms(results: Report) -> list[Table]:
    components = columns("T", NAMED, "t_target(1)", "t_target(k+1)", "t_draft")
    apart = [row for row in results.overall if row.component_times is not None]
    tried = [peer for peer in results.peers if not peer.best]
    note = "On separate prompts, not comparable with the speeds above."
    return [
        Table("Component times", components, apart, is_detail=True),
        Table("All arms", _ARMS, results.arms, is_detail=True),
        Table("Settings tried for transformers assisted generation", _TRIED, tried, note, is_detail=True),
    ]


_GREEDY = (
    "Greedy decoding only: figures at temperature 0 depend on how much the text repeats itself, so none is a headline."
)


def page_of(results: dict[str, Any], curves: Curves | None = None) -> Page:
    """Headline figures, plots, every table, and how it was measured."""
    found = Report.model_validate(results)
    target, own = found.target, [] if headline_row(found) else [_GREEDY]
    precision = f"{target.dtype}{', ' + target.quantization if target.quantization else ''}"
    order = " Sampled decoding first." if len({row.temperature > 0 for row in found.rows}) == 2 else ""
    return Page(
        title=f"Report: {found.name}",
        results=results,
        method="report_method.j2",
        template="report",
        shown=_headline(found),
        lead=f"A target of {size(target.num_parameters)}, {precision} ({target.path}), served with the drafts "
        f"{', '.join(found.drafts)}; its output does not change.{order}",
        headline=[*own, *remarks(found)],
        plots=_plots(found, curves or {}),
        every_table=report_tables(found),
    )


def render_block(results: dict[str, Any]) -> str:
    """The short form for README.md: headline, main table, machine and command."""
    found = Report.model_validate(results)
    main, told = main_table(found), ONE_PROCESS
    if found.runs:
        main, told = replace(main, columns=SHORT, rows=short_rows(found.overall, headline_row(found))), ""
    page = page_of(results)
    return render_markdown("block.md.j2", page=page, results=results, main=main, told=told, **page.shown).strip()


def _headline(results: Report) -> dict[str, Any]:
    """What the headline tells of: its row, those of other drafts at its temperature, and the best peer there."""
    row = headline_row(results)
    if row is None:
        return {"report": results, "row": None}
    peers = [one for one in results.peers if one.temperature == row.temperature]
    others = [one for one in results.overall if one.temperature == row.temperature and not one.setting]
    peer = next((over_peer(results, row, one) for one in peers if one.best), None)
    found = {
        "report": results,
        "row": row,
        "contest": results.contest,
        "others": [one for one in others if one.draft != row.draft],
        "peer": peer,
        "num_tried": sum(not one.best for one in peers),
    }
    if not results.runs:
        return found
    both = sides(results, row)
    return {**found, "both": both, "side_by_side": side_by_side(both, peer), "plain": baselines(results, row)}


def _plots(results: Report, curves: Curves) -> list[Plot]:
    lengths = "Speedup against draft length, measured in the interleaved run, and predicted from component times."
    acceptance = "Acceptance by position in the draft, counted in the timed run."
    temperatures = (
        "alpha and the speedup it promises, teacher-forced, against temperature. The coupled verifier accepts "
        "slightly less than alpha, so this prediction is an upper estimate."
    )
    training = "Training curves. Losses of different objectives are on different scales; alpha and tau compare."
    sweeps = results.sweeps
    plots = [
        (sweeps.num_draft_tokens.points, Plot(lambda: draft_length_plot(results), lengths)),
        (True, Plot(lambda: acceptance_plot(results), acceptance)),
        (sweeps.temperature.points, Plot(lambda: temperature_plot(results), temperatures, is_wide=True)),
        (curves, Plot(lambda: training_plot(results, curves), training, is_wide=True)),
    ]
    return [plot for has_points, plot in plots if has_points]
