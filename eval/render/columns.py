"""Tables as declarations: a column is its heading and how it writes a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.render.formatting import (
    MISSING,
    megabytes,
    milliseconds,
    number,
    share,
    short,
    thousands,
    whole,
    with_interval,
)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A heading, and a row's cell below it."""

    header: str
    value: Callable[[Any], str]


@dataclass(frozen=True)
class Table:
    """A title, and columns over rows; `note` says what must be known to read it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    note: str = ""
    reason: str = ""
    """Why there are no rows; a table without rows and without a reason is left out."""

    @property
    def headers(self) -> list[str]:
        """Of the columns, left to right."""
        return [column.header for column in self.columns]

    @property
    def cells(self) -> list[list[str]]:
        """A list per row, as plain text."""
        return [[column.value(row) for column in self.columns] for row in self.rows]


def column(header: str, key: str | None = None, write: Callable[[Any], str] = str) -> Column:
    """The field `key`, named as the heading unless told otherwise."""
    return Column(header, lambda row: write(row[key or header]))


def estimate(header: str, key: str | None = None, digits: int = 2) -> Column:
    """A figure with its 95% interval, which lies in the field KEY_ci95."""
    name = key or header
    return Column(header, lambda row: with_interval(row[name], row[f"{name}_ci95"], digits))


def columns(*wanted: str | Column) -> list[Column]:
    """By their headings in `SHARED`; any other heading names the field that is shown as it is."""
    return [one if isinstance(one, Column) else SHARED.get(one) or column(one) for one in wanted]


def flips(row: Row) -> str:
    """Sequences of the timed run that rounding made differ, out of tokens."""
    if row["dtype_flips"] is None:
        return MISSING
    return f"{row['dtype_flips']} in {row['dtype_tokens_compared']:,} ({row['dtype']})"


def _over_peer(peer: Row) -> str:
    return with_interval(peer["ratio_ours_over_peer"], peer["ratio_ci95"])


def _component(header: str, key: str) -> Column:
    return Column(header, lambda row: milliseconds(row["component_times"][key]))


_FIGURES = (
    column("T", "temperature", short),
    column("batch", "batch_size"),
    column("k", "num_draft_tokens"),
    estimate("alpha", digits=3),
    estimate("tau"),
    column("tokens/s", "tokens_per_s", whole),
    column("baseline", "baseline_tokens_per_s", whole),
    estimate("speedup"),
    estimate("whole call", "whole_call_speedup"),
    column("predicted", "predicted_speedup", number),
    column("realised", write=number),
    column("mismatches", write=thousands),
    column("near-ties", "near_ties", thousands),
    column("in tokens", "tokens_checked", thousands),
    Column("flips when timed", flips),
    column("repeated 4-grams", "repeated_4gram_share", share),
    column("ttft", "ttft_s", milliseconds),
    Column("itl p50", lambda row: milliseconds(row["itl_s"]["p50"])),
    Column("itl p95", lambda row: milliseconds(row["itl_s"]["p95"])),
    column("memory", "peak_memory_bytes", megabytes),
    _component("t_target(1)", "t_target_1_s"),
    _component("t_target(k+1)", "t_target_k1_s"),
    _component("t_draft", "t_draft_s"),
    Column("ours / peer", _over_peer),
)
SHARED = {one.header: one for one in _FIGURES}
"""Heading -> column: how a figure is written wherever it stands."""
