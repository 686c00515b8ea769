"""What several runs say together: what travels from machine to machine side by side for the draft LM and the best head,
the speedup of every run, and the short table of README.md."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from eval.render.formatting import (
    MISSING,
    NAMED,
    Column,
    Table,
    column,
    columns,
    estimate,
    hardware,
    losslessness,
    named,
    spread,
    uncached,
    whole,
    with_interval,
)
from eval.results.pooling import row_key
from eval.results.reported import AssistedPeer, Report, Run
from eval.results.schema import Row

SHORT = columns(
    *("T", NAMED, "k", "alpha", column("tokens per pass", "tau", lambda tau: f"{tau:.2f}"), "speedup"),
    Column("by run", lambda row: spread(row.speedup_by_run)),
)


def short_rows(rows: Sequence[Row], headline: Row | None) -> list[Row]:
    """Every draft as it is, and the other rules tried at the headline's temperature and draft length."""
    at = None if headline is None else (headline.temperature, headline.num_draft_tokens)
    return [row for row in rows if not row.setting or (row.temperature, row.num_draft_tokens) == at]


def sides(results: Report, row: Row) -> list[Row]:
    """The headline's row and the best of the other kind, heads against language models, by tokens per target pass."""
    others = [one for one in results.overall if one.temperature == row.temperature]
    others = [one for one in others if (one.drafter == "lm") != (row.drafter == "lm")]
    return [row, *sorted(others, key=lambda one: -one.tau)[:1]]


def side_by_side(both: Sequence[Row], peer: AssistedPeer | None) -> Table:
    """What a machine does not change, a column for each draft. transformers takes the first one alone."""
    rows = [
        ("alpha", *(with_interval(row.alpha, row.alpha_ci95, 3) for row in both)),
        (
            "tokens per target pass",
            *(f"{with_interval(row.tau, row.tau_ci95)} at k={row.num_draft_tokens}" for row in both),
        ),
        ("ours over transformers assisted", _over(peer), *(MISSING for _ in both[1:])),
        ("the same text as without a draft", *map(losslessness, both)),
        ("against a forward without a cache", *(uncached(row) or MISSING for row in both)),
    ]
    kinds = ["draft LM" if row.drafter == "lm" else "head" for row in both]
    headers = ["", *(f"{named(row)}, {'best ' if i else ''}{kinds[i]}" for i, row in enumerate(both))]
    return Table("What travels", [Column(one, itemgetter(i)) for i, one in enumerate(headers)], rows)


def _over(peer: AssistedPeer | None) -> str:
    if peer is None:
        return MISSING
    ratio = with_interval(peer.ratio_ours_over_peer, peer.ratio_ci95)
    return f"{ratio}; by run {spread(peer.ratio_by_run)}"


def runs_table(results: Report, both: Sequence[Row]) -> Table:
    """A row for each run: where, when, and how fast with the drafts of `both` and without one."""
    speedup = estimate("speedup").value
    shown = [
        Column("machine", lambda run: hardware(run.environment)),
        Column("began (UTC)", lambda run: run.environment["started"][:16].replace("T", " ")),
        Column("tokens/s without a draft", lambda run: whole(_of(run, both[0]).baseline_tokens_per_s)),
        *(Column(f"{one.draft}: speedup", lambda run, one=one: speedup(_of(run, one))) for one in both),
        Column("revision", lambda run: (run.environment["git"]["revision"] or MISSING)[:7]),
    ]
    return Table("Runs", shown, results.runs, "Of each run intervals are over its prompts alone.")


def _of(run: Run, row: Row) -> Row:
    return next(one for one in run.rows if row_key(one) == row_key(row))


def baselines(results: Report, row: Row) -> list[float | None]:
    """Tokens per second without a draft, by run."""
    return [_of(run, row).baseline_tokens_per_s for run in results.runs]
