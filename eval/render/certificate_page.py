"""certificate.md: the certificate in plain words, rendered from certificate.json alone."""

from __future__ import annotations

from typing import Any

from decode.common.markdown import facts, plain
from eval.render.formatting import count, hardware, number
from eval.render.summary import markdown_table
from eval.render.tables import Table

LISTED = 20
LOSSLESS = (
    "Exact in distribution; equal in fp64; equal in fp32 but for near-ties; bf16 may flip near-ties, and the rate is "
    "reported."
)


def render_certificate(found: dict[str, Any]) -> str:
    """Verdict, counts, what was compared, divergences, and on what."""
    parts = [
        "# Losslessness certificate",
        _verdict(found),
        _compared(found),
        markdown_table(_counts(found), heading=None),
        f"What lossless means: {LOSSLESS}",
        "A divergence is the first token where both texts differ; comparison then goes on from the target's own "
        "prefix, so one hides nothing behind it. In float32 it is a near-tie when both tokens lie within 1e-4 of the "
        "best score (log p, plus the noise at temperatures above 0), else a mismatch.",
        "Uncached: the target's texts held, token by token, against one plain forward of the model over each of them, "
        "without our cache, masks or passes, which both loops share. A token that this forward would not choose is a "
        "flip; in float32 it is a mismatch or a near-tie by the same rule.",
        _padding(found),
        *_listed(found),
        "## On what",
        facts(_facts(found)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(found: dict[str, Any]) -> str:
    if found["failures"]:
        return f"**NOT lossless: {plain('; '.join(found['failures']))}.**"
    judged = [row for row in found["parts"] if row["is_judged"]]
    tokens = sum(row["tokens"] for row in judged)
    if not judged:
        return "**Nothing was judged: no part ran in float32 or wider. Set lossless.dtype=float32.**"
    near_ties = sum(row["near_ties"] for row in judged)
    words = f"**No mismatch in {tokens:,} tokens ({judged[0]['dtype']}), {count(near_ties, 'near-tie')}.**"
    uncached = sum(row["uncached_tokens_checked"] for row in judged)
    words += f" An uncached forward would have written the same in {uncached:,}."
    rest = [row for row in found["parts"] if not row["is_judged"]]
    if rest:
        found_there, tokens = sum(len(row["divergences"]) for row in rest), sum(row["tokens"] for row in rest)
        words += (
            f" In {rest[0]['dtype']}, the target's own precision, {count(found_there, 'divergence')} in {tokens:,}."
        )
    return words


def _compared(found: dict[str, Any]) -> str:
    prompts, settings = found["prompts"], found["decode"]
    strict = ", every pass padded to the same rows (strict)" if settings["strict"] else ""
    return (
        f"The target wrote up to {prompts['new_tokens']} tokens after each prompt alone, one token a pass, in batches "
        f"of {prompts['batch_size']}. The speculative decoder wrote the same with the draft, from the same prompts, "
        f"settings and noise, in the same runtime{strict}. Both texts were compared token by token."
    )


def _counts(found: dict[str, Any]) -> Table:
    columns = (
        "precision",
        "T",
        "tokens",
        "asked for",
        "texts",
        "mismatches",
        "near-ties",
        "divergences",
        "per 10,000 tokens",
        "uncached: mismatches",
        "near-ties",
        "flips",
        "in tokens",
        "per 10,000 tokens",
    )
    return Table("Counts", columns, [_cells(row) for row in found["parts"]])


def _cells(row: dict[str, Any]) -> list[str]:
    judged = row["is_judged"]
    return [
        row["dtype"],
        f"{row['temperature']:g}",
        f"{row['tokens']:,}",
        f"{row['wanted_tokens']:,}",
        f"{row['sequences']:,}",
        number(row["mismatches"] if judged else None, 0),
        number(row["near_ties"] if judged else None, 0),
        f"{len(row['divergences']):,}",
        _per_10_000(row["divergences_per_token"]),
        number(row["uncached_mismatches"] if judged else None, 0),
        number(row["uncached_near_ties"] if judged else None, 0),
        f"{row['uncached_flips']:,}",
        f"{row['uncached_tokens_checked']:,}",
        _per_10_000(row["uncached_flips_per_token"]),
    ]


def _per_10_000(rate: float | None) -> str:
    return number(None if rate is None else 1e4 * rate)


def _padding(found: dict[str, Any]) -> str:
    padding = found["padding"]
    if padding is None:
        return ""
    speeds = padding["tokens_per_s"]
    return (
        f"What strict costs (batch {padding['batch_size']}, T={padding['temperature']:g}): the plain loop, padded to "
        f"{padding['rows']} rows a pass, makes {number(speeds['plain_padded'], 0)} tokens/s, unpadded "
        f"{number(speeds['plain'], 0)}; the speculative loop {number(speeds['speculative_padded'], 0)} against "
        f"{number(speeds['speculative'], 0)}."
    )


def _listed(found: dict[str, Any]) -> list[str]:
    rows = [(part, one) for part in found["parts"] for one in part["divergences"]]
    if not rows:
        return []
    cells = [
        [
            f"{part['dtype']}, T={part['temperature']:g}",
            one["prompt"],
            str(one["position"]),
            str(one["target_token"]),
            str(one["speculative_token"]),
            f"{one['top2_margin']:.2g}",
        ]
        for part, one in rows[:LISTED]
    ]
    columns = ("part", "prompt", "position", "target's token", "speculative token", "top-2 margin")
    largest = max(one["top2_margin"] for _, one in rows)
    note = (
        f"{min(LISTED, len(rows))} of {len(rows):,}; all are in certificate.json. The margin is by how much the target "
        f"prefers its best token to its second (in that precision, noise included); the largest is {largest:.2g}."
    )
    return [markdown_table(Table("Divergences", columns, cells, note), heading="##")]


def _facts(found: dict[str, Any]) -> dict[str, str]:
    environment, prompts = found["environment"], found["prompts"]
    packages = environment["packages"]
    settings = ", ".join(f"{name}={value}" for name, value in found["decode"].items() if name != "max_new_tokens")
    return {
        "Target": _model(found["target"]),
        "Draft": _model(found["draft"]),
        "Settings": settings,
        "Prompts": f"{prompts['prompts']:,} of {prompts['source']}; once used up, again after 16 tokens that the "
        "target samples",
        "Machine": hardware(environment),
        "Software": f"torch {packages.get('torch')}, transformers {packages.get('transformers')}, Python "
        f"{environment['python']}; revision {environment['git']['revision']}",
        "Seed": str(environment["seed"]),
        "Command": f"`{environment['command']}`",
    }


def _model(model: dict[str, Any]) -> str:
    return f"{model['path']}, {model['num_parameters'] / 1e6:,.1f}M parameters, fingerprint {model['fingerprint']}"
