"""The table of joules per emitted token, the same on every page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.render.formatting import Column, Table, columns, with_interval

_NOTE = (
    "Joules of whole calls over emitted tokens, the median over batches of prompts, or over rounds of the same ones; "
    "brackets are 95% intervals over these. Counters see the whole processor or GPU, other programs included."
)


def energy_table(results: Mapping[str, Any]) -> Table:
    """Every arm's; why there is none, in a line, where nothing was metered; nothing for results of earlier versions."""
    entries = results.get("energy") or []
    known = [one for one in entries if one["joules_per_token"] is not None]
    reasons = "; ".join(dict.fromkeys(one["reason"] for one in entries if one["reason"]))
    without = f"Not measured: {reasons}." if reasons else ""
    if not known:
        return Table("Energy", columns("arm"), [], without, reason=without)
    shown = columns("where", "arm", Column("J/token", _joules), Column("from", _source))
    return Table("Energy", shown, known, " ".join(filter(None, (_NOTE, _marked(known), without))))


def _joules(one: Mapping[str, Any]) -> str:
    figure = with_interval(one["joules_per_token"], one["joules_per_token_ci95"], digits=3)
    return f"{figure} (estimate)" if one["kind"] == "estimate" else figure


def _source(one: Mapping[str, Any]) -> str:
    return f"estimate: {one['source']}" if one["kind"] == "estimate" else one["source"]


def _marked(known: Sequence[Mapping[str, Any]]) -> str:
    is_estimated = any(one["kind"] == "estimate" for one in known)
    return (
        "An estimate is the stated power times the seconds of a call: it says what times say." if is_estimated else ""
    )
