"""The headline of a report: of the drafts and settings that compete, the one that was fastest on prompts that are not
reported. Its figures are its row's, from prompts that had no part in the choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from decode.sampling.config import SamplingConfig
from eval.arms.ours import drafting
from eval.comparison_config import named_settings
from eval.config import EvalConfig
from eval.results.compared import Choice
from eval.results.reported import AssistedPeer, Contest, Report, Run
from eval.results.schema import Row
from eval.results.statistics import Estimate, bootstrap_crossed, median_of_ratios

HEADLINE = "headline"
"""Among the families of a choice, what competes for it."""


def arm_name(draft: str, k: int) -> str:
    """Name of a speculative arm of a report, as `decode` is set."""
    return f"{draft} k={k}"


@dataclass(frozen=True)
class Rival:
    """A draft with settings of its own."""

    arm: str
    draft: str
    settings: SamplingConfig
    setting: str | None = None
    """Its name in headline.settings; None as `decode` is set."""


def rivals(cfg: EvalConfig, temperature: float) -> list[Rival]:
    """What competes at that temperature; at 0 settings that differ in the rule alone are one."""
    k = cfg.decode.num_draft_tokens
    usual = drafting(cfg, temperature, k)
    others = named_settings(cfg.headline.settings, cfg.decode, temperature, "headline.settings")
    return [
        rival
        for draft in cfg.headline.drafts
        for rival in (
            Rival(arm_name(draft, k), draft, usual),
            *(Rival(f"{draft} {name}", draft, one, name) for name, one in others.items() if one != usual),
        )
    ]


def contests(cfg: EvalConfig, choices: Sequence[Choice], source: str) -> list[dict[str, Any]]:
    """By temperature, who competed and who won; [] where nobody did."""
    return [
        {
            "temperature": choice.temperature,
            "best": choice.best[HEADLINE],
            "prompts": choice.prompts,
            "source": source,
            "rivals": [
                {
                    "arm": one.arm,
                    "draft": one.draft,
                    "setting": one.setting,
                    "verifier": one.settings.verifier,
                    "num_draft_tokens": one.settings.num_draft_tokens,
                    "tokens_per_s": choice.tokens_per_s[HEADLINE][one.arm],
                }
                for one in rivals(cfg, choice.temperature)
            ],
        }
        for choice in choices
        if HEADLINE in choice.best
    ]


def pooled_contests(runs: Sequence[Report]) -> list[Contest]:
    """Of several runs: the winner is the fastest by the median of each one's speeds in the choices of all runs."""
    return [_pooled(each) for each in zip(*(run.headline for run in runs), strict=True)]


def _pooled(each: Sequence[Contest]) -> Contest:
    speeds = [{one.arm: one.tokens_per_s or 0.0 for one in contest.rivals} for contest in each]
    medians = {one.arm: median(by[one.arm] for by in speeds) for one in each[0].rivals}
    found = [one.model_copy(update={"tokens_per_s": medians[one.arm]}) for one in each[0].rivals]
    return each[0].model_copy(update={"best": max(medians, key=lambda arm: medians[arm]), "rivals": found})


def headline_row(results: Report) -> Row | None:
    """The winner's row over all prompts, or the first draft's at the first temperature above 0 where none compete; a
    greedy row is never a headline."""
    rows = [row for row in results.rows if row.category is None and row.temperature > 0]
    contest = results.contest
    if contest is not None:
        best = next(one for one in contest.rivals if one.arm == contest.best)
        wanted = (contest.temperature, best.draft, best.setting)
        rows = [row for row in rows if (row.temperature, row.draft, row.setting) == wanted]
    return next(iter(rows), None)


def over_peer(results: Report, row: Row, peer: AssistedPeer) -> AssistedPeer:
    """`peer` with its ratio to that row's arm, as it stands where that is the arm that it was held against."""
    if (row.draft, row.setting) == (peer.draft, None):
        return peer
    each = [_pairs(run, row, peer) for run in results.runs or [results]]
    columns = np.array(each, dtype=float)
    known = columns[:, np.isfinite(columns).all((0, 2))]
    estimate = bootstrap_crossed(known, median_of_ratios, row.seed) if known.size else None
    by_run = [median_of_ratios(one[None])[0].item() for one in known]
    return peer.model_copy(update={**ours_over(estimate), "ratio_by_run": by_run})


def ours_over(estimate: Estimate | None) -> dict[str, Any]:
    """The fields of a peer that tell how many times as fast we are."""
    return {"ratio_ours_over_peer": estimate and estimate.value, "ratio_ci95": estimate and estimate.interval}


def _pairs(run: Report | Run, row: Row, peer: AssistedPeer) -> list[tuple[float, float]]:
    """Seconds per token of the peer and of the row's arm, by prompt; NaN where one of them is unknown."""
    wanted = (row.draft, row.setting, row.temperature, row.category)
    (ours,) = (one for one in run.rows if (one.draft, one.setting, one.temperature, one.category) == wanted)
    (theirs,) = (one for one in run.peers if one.best and one.temperature == peer.temperature)
    return list(_both(theirs.seconds_by_prompt or [], ours.seconds_by_prompt or []))


def _both(theirs: Sequence[Any], ours: Sequence[Any]) -> Iterator[tuple[float, float]]:
    for peer, own in zip(theirs, ours, strict=True):
        yield (peer[0], own[1]) if peer is not None and own is not None else (np.nan, np.nan)
