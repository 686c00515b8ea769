"""How figures are written, the same on the page, in the summary and in the docs; and tables as declarations, a column
being its heading and how it writes a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.results import schema
from eval.results.reported import AssistedPeer, Unquantised

MISSING = "–"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Fixed digits, or a dash for what was not measured."""
    return MISSING if value is None else f"{value:.{digits}f}{unit}"


def with_interval(value: float | None, ci95: Sequence[float] | None, digits: int = 2, unit: str = "") -> str:
    """value [low, high]."""
    shown = number(value, digits, unit)
    return shown if value is None or ci95 is None else f"{shown} {interval(ci95, digits)}"


def whole(value: float | None) -> str:
    """To a whole number, without digits."""
    return number(value, 0)


def thousands(value: int | None) -> str:
    """A whole number, its thousands set apart."""
    return MISSING if value is None else f"{value:,}"


def short(value: float) -> str:
    """In as few digits as it takes, such as a temperature."""
    return f"{value:g}"


def share(value: float | None) -> str:
    """A share in per cent."""
    return MISSING if value is None else f"{100 * value:.0f}%"


def milliseconds(value: float | None) -> str:
    """Seconds, written in ms."""
    return MISSING if value is None else f"{1e3 * value:.1f} ms"


def duration(seconds: float) -> str:
    """In the unit that leaves two digits or three: 45 s, 12 min, 3.1 h."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def guess(seconds: float) -> str:
    """A time that was estimated by sizes alone, which know it to a factor of some 3 either way."""
    return f"{duration(seconds / 3)} to {duration(3 * seconds)}, by sizes alone"


def megabytes(value: float | None) -> str:
    """Bytes, written in MB or GB."""
    if not value:
        return MISSING
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def losslessness(row: schema.Row) -> str:
    """Mismatches, near-ties and tokens compared, in words."""
    if row.mismatches is None:
        return f"not counted: {row.verifier} verification keeps the distribution, not the tokens"
    return _compared(row.mismatches, row.near_ties, row.tokens_checked)


def uncached(row: schema.Row) -> str | None:
    """The same against an uncached forward; None where it was not made."""
    if row.uncached_mismatches is None:
        return None
    return _compared(row.uncached_mismatches, row.uncached_near_ties, row.uncached_tokens_checked)


def _compared(mismatches: int, near_ties: int | None, tokens: int) -> str:
    return f"{count(mismatches, 'mismatch', 'es')}, {count(near_ties or 0, 'near-tie')} in {tokens:,} tokens"


def count(number: int, word: str, ending: str = "s") -> str:
    """1 word, 2 words."""
    return f"{number:,} {word}{'' if number == 1 else ending}"


def setting(peer: AssistedPeer) -> str:
    """A peer's setting in short; of runs that chose others, all of them."""
    each = peer.settings_by_run or [peer.setting]
    named = [f"k={one['num_assistant_tokens']}, threshold {one['assistant_confidence_threshold']:g}" for one in each]
    return " or ".join(dict.fromkeys(named))


def spread(values: Sequence[float | None], digits: int = 1) -> str:
    """What several runs found: the least to the most."""
    known = [value for value in values if value is not None]
    ends = [number(value, digits) for value in (min(known), max(known))] if known else [MISSING]
    return " to ".join(dict.fromkeys(ends))


def machines(environments: Sequence[dict[str, Any]]) -> str:
    """Each machine once, with its runs where there are several machines."""
    each = Counter(map(hardware, environments))
    return "; ".join(f"{name} ({count(runs, 'run')})" if len(each) > 1 else name for name, runs in each.items())


def by_reason(left_out: Mapping[str, str]) -> str:
    """Of arm -> reason: arms of one reason together, the reason once."""
    arms: dict[str, list[str]] = {}
    for arm, reason in left_out.items():
        arms.setdefault(reason, []).append(arm)
    return "; ".join(f"{', '.join(names)} ({reason.rstrip('.')})" for reason, names in arms.items())


def interval(ci95: Sequence[float] | None, digits: int = 2) -> str:
    """A 95% interval alone."""
    return "no interval" if ci95 is None else f"[{ci95[0]:.{digits}f}, {ci95[1]:.{digits}f}]"


def hardware(environment: dict[str, Any]) -> str:
    """The machine in one line."""
    device = environment.get("cuda_device")
    cpu = f"{environment.get('cpu')}, {environment.get('cores')} cores, {environment.get('threads')} threads"
    return f"{device}; {cpu}" if device else cpu


def software(environment: dict[str, Any]) -> str:
    """Versions in one line."""
    packages = environment.get("packages", {})
    versions = f"torch {packages.get('torch')}, transformers {packages.get('transformers')}"
    return f"{versions}, Python {environment['python']}"


def size(num_parameters: int) -> str:
    """How large a model is."""
    return f"{num_parameters / 1e6:,.1f}M parameters"


def folders(named: Mapping[str, str]) -> str:
    """Names with their folders."""
    return ", ".join(f"{name} ({path})" for name, path in named.items())


def batches(timed: Mapping[str, int]) -> str:
    """Batch size -> number of batches, in words."""
    return ", ".join(f"{number} of {rows}" for rows, number in timed.items())


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
    is_detail: bool = False
    """Left out of a published page: what was tried on the way, and what the JSON beside it tells as well."""

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
    return Column(header, lambda row: write(getattr(row, key or header)))


def estimate(header: str, key: str | None = None, digits: int = 2) -> Column:
    """A figure with its 95% interval, which lies in the field KEY_ci95."""
    name = key or header
    return Column(header, lambda row: with_interval(getattr(row, name), getattr(row, f"{name}_ci95"), digits))


def columns(*wanted: str | Column) -> list[Column]:
    """By their headings in `SHARED`; any other heading names the field that is shown as it is."""
    return [one if isinstance(one, Column) else SHARED.get(one) or column(one) for one in wanted]


def named(row: schema.Row | Unquantised) -> str:
    """The draft of a report's row, and its setting where that is one of headline.settings."""
    return row.draft if row.setting is None else f"{row.draft}, {row.setting}"


NAMED = Column("draft", named)


def flips(row: Any) -> str:
    """Sequences of the timed run that rounding made differ, out of tokens."""
    if row.dtype_flips is None:
        return MISSING
    return f"{row.dtype_flips} in {row.dtype_tokens_compared:,} ({row.dtype})"


def _part(header: str, whole: str, part: str) -> Column:
    return Column(header, lambda row: milliseconds(getattr(getattr(row, whole), part)))


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
    estimate("realised"),
    column("mismatches", write=thousands),
    column("near-ties", "near_ties", thousands),
    column("in tokens", "tokens_checked", thousands),
    Column("flips when timed", flips),
    column("repeated 4-grams", "repeated_4gram_share", share),
    column("ttft", "ttft_s", milliseconds),
    _part("itl p50", "itl_s", "p50"),
    _part("itl p95", "itl_s", "p95"),
    column("memory", "peak_memory_bytes", megabytes),
    _part("t_target(1)", "component_times", "t_target_1_s"),
    _part("t_target(k+1)", "component_times", "t_target_k1_s"),
    _part("t_draft", "component_times", "t_draft_s"),
    Column("ours / peer", lambda peer: with_interval(peer.ratio_ours_over_peer, peer.ratio_ci95)),
)
SHARED = {one.header: one for one in _FIGURES}
"""Heading -> column: how a figure is written wherever it stands."""
