"""Tables as declarations: a column is its heading and how it writes a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.render.formatting import MISSING, milliseconds, number, share, short, whole, with_interval

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


def flips_rate(row: Row) -> str:
    """Sequences of the timed run that rounding made differ, out of tokens."""
    if row["dtype_flips"] is None:
        return MISSING
    return f"{row['dtype_flips']} in {row['dtype_tokens_compared']:,} ({row['dtype']})"


def _component(header: str, key: str) -> Column:
    return Column(header, lambda row: milliseconds(row["component_times"][key]))


TEMPERATURE = column("T", "temperature", short)
BATCH = column("batch", "batch_size")
TEXT = column("text")
DRAFT = column("draft")
DRAFT_TOKENS = column("k", "num_draft_tokens")
ALPHA = estimate("alpha", digits=3)
TAU = estimate("tau")
TOKENS_PER_S = column("tokens/s", "tokens_per_s", whole)
SPEEDUP = estimate("speedup")
PREDICTED = column("predicted", "predicted_speedup", number)
REALISED = column("realised", write=number)
FLIPS = Column("flips when timed", flips_rate)
REPEATED = column("repeated 4-grams", "repeated_4gram_share", share)
COMPONENT_TIMES = (
    _component("t_target(1)", "t_target_1_s"),
    _component("t_target(k+1)", "t_target_k1_s"),
    _component("t_draft", "t_draft_s"),
)
