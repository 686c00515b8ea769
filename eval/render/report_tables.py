"""The report's tables."""

from __future__ import annotations

from typing import Any

from eval.render.columns import (
    ALPHA,
    COMPONENT_TIMES,
    DRAFT,
    DRAFT_TOKENS,
    FLIPS,
    PREDICTED,
    REALISED,
    REPEATED,
    SPEEDUP,
    TAU,
    TEMPERATURE,
    TOKENS_PER_S,
    Column,
    Row,
    Table,
    column,
    estimate,
)
from eval.render.formatting import MISSING, megabytes, milliseconds, number, setting, thousands, whole, with_interval

_SPEED = (
    *(TEMPERATURE, DRAFT, DRAFT_TOKENS, ALPHA, TAU, TOKENS_PER_S),
    column("baseline", "baseline_tokens_per_s", whole),
    SPEEDUP,
    estimate("whole call", "whole_call_speedup"),
    *(PREDICTED, REALISED),
)
_EXACTNESS = (
    *(TEMPERATURE, DRAFT, column("verifier")),
    column("mismatches", write=thousands),
    column("near-ties", "near_ties", thousands),
    column("in tokens", "tokens_checked", thousands),
    *(FLIPS, REPEATED),
    column("ttft", "ttft_s", milliseconds),
    Column("itl p50", lambda row: milliseconds(row["itl_s"]["p50"])),
    Column("itl p95", lambda row: milliseconds(row["itl_s"]["p95"])),
    column("memory", "peak_memory_bytes", megabytes),
)
_PEERS = (
    TEMPERATURE,
    Column("peer", lambda peer: f"{peer['name']} {peer['version']}"),
    Column("best setting", setting),
    TOKENS_PER_S,
    Column("ours / peer", lambda peer: with_interval(peer["ratio_ours_over_peer"], peer["ratio_ci95"])),
)
_TRIED = (TEMPERATURE, Column("setting", setting), TOKENS_PER_S)
_CATEGORIES = (column("category"), TEMPERATURE, DRAFT, column("prompts"), ALPHA, TAU, SPEEDUP)
_LENGTHS = (DRAFT_TOKENS, column("tau", write=number), TOKENS_PER_S, SPEEDUP, PREDICTED, REALISED)
_CURVE = (
    *(TEMPERATURE, DRAFT),
    Column("alpha", lambda point: number(point["alpha"], 3)),
    column("expected tau", "tau", number),
    column("predicted speedup", "predicted_speedup", number),
)
_ARMS = (TEMPERATURE, column("arm"), Column("tokens/s", lambda arm: number(arm["tokens_per_s"], 1)))


def _uncached_flips(row: Row) -> str:
    flips, tokens = row["uncached_dtype_flips"], row["uncached_dtype_tokens"]
    return (
        MISSING if flips is None else f"{flips:,} in {tokens:,} ({100 * flips / max(tokens, 1):.2f}%, {row['dtype']})"
    )


_UNCACHED = (
    *(TEMPERATURE, DRAFT),
    column("mismatches", "uncached_mismatches", thousands),
    column("near-ties", "uncached_near_ties", thousands),
    column("in tokens", "uncached_tokens_checked", thousands),
    Column("flips when timed", _uncached_flips),
)


def overall_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows over all prompts, sampled ones before greedy ones."""
    rows = [row for row in results["rows"] if row["category"] is None]
    return sorted(rows, key=lambda row: row["temperature"] == 0)


def main_table(results: dict[str, Any]) -> Table:
    """Speed and acceptance over all prompts."""
    return Table("Results", _SPEED, overall_rows(results), "Brackets are 95% intervals over prompts.")


def report_tables(results: dict[str, Any]) -> list[Table]:
    """Every table, in reading order."""
    return [main_table(results), *_tables_of_exactness(results), *_tables_of_sweeps(results), *_tables_of_arms(results)]


def _tables_of_exactness(results: dict[str, Any]) -> list[Table]:
    rows, peers = overall_rows(results), [peer for peer in results["peers"] if peer["best"]]
    left_out = f"Left out: {results['peers_left_out']}." if results["peers_left_out"] else ""
    energy = f"Energy: {rows[0]['energy_reason']}." if rows else ""
    uncached = [row for row in rows if "uncached_mismatches" in row]
    apart = "What both of our loops get wrong alike shows here: this forward has neither cache nor masks of ours."
    return [
        Table("Against transformers assisted generation", _PEERS, peers, left_out, reason=left_out),
        Table("Exactness and latency", _EXACTNESS, rows, energy),
        Table("Against an uncached forward", _UNCACHED, uncached, apart),
        Table("By category", _CATEGORIES, [row for row in results["rows"] if row["category"] is not None]),
    ]


def _tables_of_sweeps(results: dict[str, Any]) -> list[Table]:
    lengths, curve = results["sweeps"]["num_draft_tokens"], results["sweeps"]["temperature"]
    title = f"Draft length ({lengths['draft']}, T={lengths['temperature']:g})"
    promised = "Teacher-forced. tau is what alpha promises; the coupled verifier accepts slightly less."
    return [Table(title, _LENGTHS, lengths["points"]), Table("Temperature", _CURVE, curve["points"], promised)]


def _tables_of_arms(results: dict[str, Any]) -> list[Table]:
    tried = [peer for peer in results["peers"] if not peer["best"]]
    title, note = "Settings tried for transformers assisted generation", "On separate prompts, not comparable with the"
    return [
        Table("Component times", (TEMPERATURE, DRAFT, *COMPONENT_TIMES), overall_rows(results)),
        Table("All arms", _ARMS, results["arms"]),
        Table(title, _TRIED, tried, f"{note} speeds above."),
    ]
