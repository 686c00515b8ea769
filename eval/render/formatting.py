"""How figures are written, the same on the page, in the summary and in the docs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MISSING = "–"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Fixed digits, or a dash for what was not measured."""
    return MISSING if value is None else f"{value:.{digits}f}{unit}"


def with_interval(value: float | None, ci95: Sequence[float] | None, digits: int = 2, unit: str = "") -> str:
    """value [low, high]."""
    if value is None or ci95 is None:
        return number(value, digits, unit)
    return f"{value:.{digits}f}{unit} [{ci95[0]:.{digits}f}, {ci95[1]:.{digits}f}]"


def share(value: float | None) -> str:
    """A share in per cent."""
    return MISSING if value is None else f"{100 * value:.0f}%"


def milliseconds(value: float | None) -> str:
    """Seconds, written in ms."""
    return MISSING if value is None else f"{1e3 * value:.1f} ms"


def megabytes(value: float | None) -> str:
    """Bytes, written in MB or GB."""
    if not value:
        return MISSING
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def losslessness(row: dict[str, Any]) -> str:
    """Mismatches, near-ties and tokens compared, in words."""
    if row["mismatches"] is None:
        return "not counted"
    mismatches, near_ties = count(row["mismatches"], "mismatch", "es"), count(row["near_ties"], "near-tie")
    return f"{mismatches}, {near_ties} in {row['tokens_checked']:,} tokens"


def uncached(row: dict[str, Any]) -> str | None:
    """The same against an uncached forward; None where it was not made, as in results of before there was one."""
    if row.get("uncached_mismatches") is None:
        return None
    named = ("mismatches", "near_ties", "tokens_checked")
    return losslessness({name: row[f"uncached_{name}"] for name in named})


def count(number: int, word: str, ending: str = "s") -> str:
    """1 word, 2 words."""
    return f"{number:,} {word}{'' if number == 1 else ending}"


def setting(peer: dict[str, Any]) -> str:
    """A peer's setting in short."""
    knobs = peer["setting"]
    return f"k={knobs['num_assistant_tokens']}, threshold {knobs['assistant_confidence_threshold']:g}"


def hardware(environment: dict[str, Any]) -> str:
    """The machine in one line."""
    device = environment.get("cuda_device")
    cpu = f"{environment.get('cpu')}, {environment.get('cores')} cores, {environment.get('threads')} threads"
    return f"{device}; {cpu}" if device else cpu


def headline_row(results: dict[str, Any]) -> dict[str, Any] | None:
    """The first draft's row over all prompts at the first temperature above 0; a greedy row is never a headline."""
    return next((row for row in results["rows"] if row["category"] is None and row["temperature"] > 0), None)


def best_peer(results: dict[str, Any], temperature: float) -> dict[str, Any] | None:
    """The peer at its best setting at this temperature."""
    return next((one for one in results["peers"] if one["best"] and one["temperature"] == temperature), None)
