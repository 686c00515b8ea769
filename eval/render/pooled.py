"""What several runs say together: what travels from machine to machine side by side for the draft LM and the best head,
the speedup of every run, and the short table of README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.render.formatting import (
    MISSING,
    NAMED,
    Column,
    Table,
    column,
    columns,
    hardware,
    losslessness,
    named,
    overall_rows,
    spread,
    uncached,
    whole,
    with_interval,
)
from eval.results.pooling import row_key

Row = Mapping[str, Any]
SHORT = columns(
    *("T", NAMED, "k", "alpha", column("tokens per pass", "tau", lambda tau: f"{tau:.2f}"), "speedup"),
    Column("by run", lambda row: spread(row["speedup_by_run"])),
)


def short_rows(rows: Sequence[Row], headline: Row | None) -> list[Row]:
    """Every draft as it is, and the other rules tried at the headline's temperature and draft length."""
    at = None if headline is None else (headline["temperature"], headline["num_draft_tokens"])
    return [row for row in rows if not row["setting"] or (row["temperature"], row["num_draft_tokens"]) == at]


def sides(results: Mapping[str, Any], row: Row) -> list[Row]:
    """The headline's row and the best of the other kind, heads against language models, by tokens per target pass."""
    others = [one for one in overall_rows(dict(results)) if one["temperature"] == row["temperature"]]
    others = [one for one in others if (one["drafter"] == "lm") != (row["drafter"] == "lm")]
    return [row, *sorted(others, key=lambda one: -one["tau"])[:1]]


def kind(row: Row) -> str:
    """In words."""
    return "draft LM" if row["drafter"] == "lm" else "head"


def side_by_side(both: Sequence[Row], peer: Row | None) -> Table:
    """What a machine does not change, a column for each draft. transformers takes the first one alone."""
    figures = {
        "alpha": [with_interval(row["alpha"], row["alpha_ci95"], 3) for row in both],
        "tokens per target pass": [
            f"{with_interval(row['tau'], row['tau_ci95'])} at k={row['num_draft_tokens']}" for row in both
        ],
        "ours over transformers assisted": [_over(peer if number == 0 else None) for number in range(len(both))],
        "the same text as without a draft": [losslessness(dict(row)) for row in both],
        "against a forward without a cache": [uncached(dict(row)) or MISSING for row in both],
    }
    rows = [{"": name, **{str(i): one for i, one in enumerate(each)}} for name, each in figures.items()]
    shown = [column(f"{named(row)}, {'best ' if i else ''}{kind(row)}", str(i)) for i, row in enumerate(both)]
    return Table("What travels", [Column("", lambda one: one[""]), *shown], rows)


def _over(peer: Row | None) -> str:
    if peer is None:
        return MISSING
    ratio = with_interval(peer["ratio_ours_over_peer"], peer["ratio_ci95"])
    return f"{ratio}; by run {spread(peer['ratio_by_run'])}"


def runs_table(results: Mapping[str, Any], both: Sequence[Row]) -> Table:
    """A row for each run: where, when, and how fast with the drafts of `both` and without one."""
    rows = [
        {"machine": hardware(run["environment"]), "began": run["environment"]["started"][:16].replace("T", " ")}
        | {"plain": _of(run, both[0])["baseline_tokens_per_s"], "revision": run["environment"]["git"]["revision"]}
        | {row["draft"]: _of(run, row) for row in both}
        for run in results["runs"]
    ]
    speedups = [column(f"{row['draft']}: speedup", row["draft"], _speedup) for row in both]
    shown = [column("machine"), column("began (UTC)", "began"), column("tokens/s without a draft", "plain", whole)]
    revision = column("revision", write=lambda text: (text or MISSING)[:7])
    return Table("Runs", [*shown, *speedups, revision], rows, "Of each run intervals are over its prompts alone.")


def _speedup(row: Row) -> str:
    return with_interval(row["speedup"], row["speedup_ci95"])


def _of(run: Mapping[str, Any], row: Row) -> Row:
    return next(one for one in run["rows"] if row_key(one) == row_key(row))


def baselines(results: Mapping[str, Any], row: Row) -> list[float | None]:
    """Tokens per second without a draft, by run."""
    return [_of(run, row)["baseline_tokens_per_s"] for run in results["runs"]]
