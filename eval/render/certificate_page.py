"""certificate.md: the certificate in plain words, rendered from certificate.json alone."""

from __future__ import annotations

from typing import Any

from eval.render.columns import Column, Table, column, columns
from eval.render.formatting import number, thousands
from eval.render.page import render_markdown

LISTED = 20
LOSSLESS = (
    "Exact in distribution; equal in fp64; equal in fp32 but for near-ties; bf16 may flip near-ties, and the rate is "
    "reported."
)


def render_certificate(found: dict[str, Any]) -> str:
    """Verdict, counts, what was compared, divergences, and on what."""
    counts, divergences = Table("Counts", _COUNTS, found["parts"]), _divergences(found)
    more = {"counts": counts, "divergences": divergences, "lossless": LOSSLESS}
    return render_markdown("certificate.md.j2", found=found, **more)


def _judged(header: str, key: str) -> Column:
    return Column(header, lambda part: thousands(part[key] if part["is_judged"] else None))


def _per_10_000(key: str) -> Column:
    return Column("per 10,000 tokens", lambda part: number(None if part[key] is None else 1e4 * part[key]))


_COUNTS = columns(
    *(column("precision", "dtype"), "T", column("tokens", write=thousands)),
    *(column("asked for", "wanted_tokens", thousands), column("texts", "sequences", thousands)),
    *(_judged("mismatches", "mismatches"), _judged("near-ties", "near_ties")),
    Column("divergences", lambda part: thousands(len(part["divergences"]))),
    _per_10_000("divergences_per_token"),
    *(_judged("uncached: mismatches", "uncached_mismatches"), _judged("near-ties", "uncached_near_ties")),
    *(column("flips", "uncached_flips", thousands), column("in tokens", "uncached_tokens_checked", thousands)),
    _per_10_000("uncached_flips_per_token"),
)
_DIVERGENCES = columns(
    *(Column("part", lambda one: f"{one['dtype']}, T={one['temperature']:g}"), "prompt", "position"),
    *(column("target's token", "target_token"), column("speculative token", "speculative_token")),
    column("top-2 margin", "top2_margin", "{:.2g}".format),
)


def _divergences(found: dict[str, Any]) -> Table:
    rows = [{**part, **one} for part in found["parts"] for one in part["divergences"]]
    note = (
        f"{min(LISTED, len(rows))} of {len(rows):,}; all are in certificate.json. The margin is by how much the target "
        "prefers its best token to its second (in that precision, noise included); the largest is "
        f"{max((row['top2_margin'] for row in rows), default=0.0):.2g}."
    )
    return Table("Divergences", _DIVERGENCES, rows[:LISTED], note)
