"""The report's tables as plain text cells, rendered as HTML by the page and as Markdown by the summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.render.formatting import megabytes, milliseconds, number, setting, share, with_interval


@dataclass(frozen=True)
class Table:
    """A heading, column names, and rows of cells; `note` says what must be known to read it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def main_table(results: dict[str, Any]) -> Table:
    """Speed and acceptance over all prompts; sampled rows before greedy ones."""
    rows = sorted((r for r in results["rows"] if r["category"] is None), key=lambda row: row["temperature"] == 0)
    return Table(
        "Results",
        ("T", "draft", "k", "alpha", "tau", "tokens/s", "baseline", "speedup", "whole call", "predicted", "realised"),
        [_main_cells(row) for row in rows],
        "Brackets are 95% intervals over prompts.",
    )


def _main_cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['temperature']:g}",
        row["draft"],
        str(row["num_draft_tokens"]),
        with_interval(row["alpha"], row["alpha_ci95"], 3),
        with_interval(row["tau"], row["tau_ci95"]),
        number(row["tokens_per_s"], 0),
        number(row["baseline_tokens_per_s"], 0),
        with_interval(row["speedup"], row["speedup_ci95"]),
        with_interval(row["whole_call_speedup"], row["whole_call_speedup_ci95"]),
        number(row["predicted_speedup"]),
        number(row["realised"]),
    ]


def exactness_table(results: dict[str, Any]) -> Table:
    """Losslessness, repetition, latency and memory."""
    rows = sorted((r for r in results["rows"] if r["category"] is None), key=lambda row: row["temperature"] == 0)
    cells = [
        [
            f"{row['temperature']:g}",
            row["draft"],
            row["verifier"],
            number(row["mismatches"], 0),
            number(row["near_ties"], 0),
            f"{row['tokens_checked']:,}",
            _flips(row),
            share(row["repeated_4gram_share"]),
            milliseconds(row["ttft_s"]),
            milliseconds(row["itl_s"]["p50"]),
            milliseconds(row["itl_s"]["p95"]),
            megabytes(row["peak_memory_bytes"]),
        ]
        for row in rows
    ]
    columns = ("T", "draft", "verifier", "mismatches", "near-ties", "in tokens", "flips when timed")
    columns = (*columns, "repeated 4-grams", "ttft", "itl p50", "itl p95", "memory")
    return Table("Exactness and latency", columns, cells, f"Energy: {rows[0]['energy_reason']}." if rows else "")


def uncached_table(results: dict[str, Any]) -> Table | None:
    """The target's own text, and the timed one, against a forward without a cache, where there was one."""
    rows = [row for row in results["rows"] if row["category"] is None and "uncached_mismatches" in row]
    if not rows:
        return None
    cells = [
        [
            f"{row['temperature']:g}",
            row["draft"],
            number(row["uncached_mismatches"], 0),
            number(row["uncached_near_ties"], 0),
            f"{row['uncached_tokens_checked']:,}",
            _rate(row["uncached_dtype_flips"], row["uncached_dtype_tokens"], row["dtype"]),
        ]
        for row in sorted(rows, key=lambda row: row["temperature"] == 0)
    ]
    columns = ("T", "draft", "mismatches", "near-ties", "in tokens", "flips when timed")
    note = "What both of our loops get wrong alike shows here: this forward has neither cache nor masks of ours."
    return Table("Against an uncached forward", columns, cells, note)


def _rate(flips: int | None, tokens: int, dtype: str) -> str:
    return number(None) if flips is None else f"{flips:,} in {tokens:,} ({100 * flips / max(tokens, 1):.2f}%, {dtype})"


def _flips(row: dict[str, Any]) -> str:
    if row["dtype_flips"] is None:
        return number(None)
    return f"{row['dtype_flips']} in {row['dtype_tokens_compared']:,} ({row['dtype']})"


def category_table(results: dict[str, Any]) -> Table | None:
    """Rows by category, where the prompts have any."""
    rows = [row for row in results["rows"] if row["category"] is not None]
    if not rows:
        return None
    cells = [
        [
            row["category"],
            f"{row['temperature']:g}",
            row["draft"],
            str(row["prompts"]),
            with_interval(row["alpha"], row["alpha_ci95"], 3),
            with_interval(row["tau"], row["tau_ci95"]),
            with_interval(row["speedup"], row["speedup_ci95"]),
        ]
        for row in rows
    ]
    return Table("By category", ("category", "T", "draft", "prompts", "alpha", "tau", "speedup"), cells)


def peer_table(results: dict[str, Any]) -> Table:
    """Every arm's speed, and ours over transformers assisted generation."""
    best = [peer for peer in results["peers"] if peer["best"]]
    cells = [
        [
            f"{peer['temperature']:g}",
            f"{peer['name']} {peer['version']}",
            setting(peer),
            number(peer["tokens_per_s"], 0),
            with_interval(peer["ratio_ours_over_peer"], peer["ratio_ci95"]),
        ]
        for peer in best
    ]
    columns = ("T", "peer", "best setting", "tokens/s", "ours / peer")
    note = f"Left out: {results['peers_left_out']}." if results["peers_left_out"] else ""
    return Table("Against transformers assisted generation", columns, cells, note)


def screening_table(results: dict[str, Any]) -> Table | None:
    """The peer's settings on the prompts where the best one was chosen."""
    tried = [peer for peer in results["peers"] if not peer["best"]]
    if not tried:
        return None
    cells = [[f"{peer['temperature']:g}", setting(peer), number(peer["tokens_per_s"], 0)] for peer in tried]
    note = "On separate prompts, not comparable with the speeds above."
    return Table("Settings tried for transformers assisted generation", ("T", "setting", "tokens/s"), cells, note)


def draft_length_table(results: dict[str, Any]) -> Table | None:
    """Speedup against k."""
    sweep = results["sweeps"]["num_draft_tokens"]
    if not sweep["points"]:
        return None
    cells = [
        [
            str(point["num_draft_tokens"]),
            number(point["tau"]),
            number(point["tokens_per_s"], 0),
            with_interval(point["speedup"], point["speedup_ci95"]),
            number(point["predicted_speedup"]),
            number(point["realised"]),
        ]
        for point in sweep["points"]
    ]
    title = f"Draft length ({sweep['draft']}, T={sweep['temperature']:g})"
    return Table(title, ("k", "tau", "tokens/s", "speedup", "predicted", "realised"), cells)


def temperature_table(results: dict[str, Any]) -> Table | None:
    """alpha and what it promises against temperature."""
    sweep = results["sweeps"]["temperature"]
    if not sweep["points"]:
        return None
    cells = [
        [f"{p['temperature']:g}", p["draft"], number(p["alpha"], 3), number(p["tau"]), number(p["predicted_speedup"])]
        for p in sweep["points"]
    ]
    note = "Teacher-forced. tau is what alpha promises; the coupled verifier accepts slightly less."
    return Table("Temperature", ("T", "draft", "alpha", "expected tau", "predicted speedup"), cells, note)


def component_table(results: dict[str, Any]) -> Table:
    """What the prediction is made of."""
    cells = [
        [
            f"{row['temperature']:g}",
            row["draft"],
            milliseconds(row["component_times"]["t_target_1_s"]),
            milliseconds(row["component_times"]["t_target_k1_s"]),
            milliseconds(row["component_times"]["t_draft_s"]),
        ]
        for row in results["rows"]
        if row["category"] is None
    ]
    return Table("Component times", ("T", "draft", "t_target(1)", "t_target(k+1)", "t_draft"), cells)


def arm_table(results: dict[str, Any]) -> Table:
    """All arms of the interleaved runs."""
    cells = [[f"{arm['temperature']:g}", arm["arm"], number(arm["tokens_per_s"], 1)] for arm in results["arms"]]
    return Table("All arms", ("T", "arm", "tokens/s"), cells)


def tables(results: dict[str, Any]) -> list[Table]:
    """Every table, in reading order."""
    every = [
        main_table(results),
        peer_table(results),
        exactness_table(results),
        uncached_table(results),
        category_table(results),
        draft_length_table(results),
        temperature_table(results),
        component_table(results),
        arm_table(results),
        screening_table(results),
    ]
    return [table for table in every if table is not None]
