"""Several runs of one report, made one: what changes from process to process has an interval over runs and prompts,
and what was counted is added up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from statistics import median
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel

from eval.results.energy import pooled_energy, same_facts
from eval.results.headline import ours_over, pooled_contests
from eval.results.reported import AssistedPeer, Report
from eval.results.schema import ComponentTimes, Row
from eval.results.statistics import Estimate, Statistic, bootstrap_crossed, described, median_of_ratios, ratio_of_sums

row_key = attrgetter(
    *("draft", "temperature", "num_draft_tokens", "category", "verifier", "tree", "setting", "batch_size", "dtype")
)
arm_key = attrgetter("temperature", "arm")
length_key = attrgetter("num_draft_tokens")
point_key = attrgetter("temperature", "draft")
"""What a row, an arm's speed, a draft length of the sweep and a point of the curve are about."""
_SUMS = ("tokens", "alpha_tokens", "mismatches", "near_ties", "tokens_checked", "uncached_mismatches")
_SUMS += ("uncached_near_ties", "uncached_tokens_checked", "dtype_flips", "dtype_tokens_compared")
_SUMS += ("uncached_dtype_flips", "uncached_dtype_tokens")
_OF_A_RUN = ("environment", "length_choice", "headline", "rows", "peers")
_MEDIANS = ("tokens_per_s", "baseline_tokens_per_s", "predicted_speedup", "realised", "ttft_s", "repeated_4gram_share")
_CURVE = ("alpha", "tau", "predicted_speedup")
One = TypeVar("One", bound=BaseModel)
_PAIRS: dict[str, tuple[str, Statistic]] = {
    "alpha": ("alpha_by_document", ratio_of_sums),
    "tau": ("passes_by_prompt", ratio_of_sums),
    "speedup": ("seconds_by_prompt", median_of_ratios),
    "whole_call_speedup": ("call_seconds_by_prompt", median_of_ratios),
}
"""Figure -> the field that holds what it is made of, and how it is made."""
DEFINITIONS = {
    "runs": "Processes that measured the same target, drafts, prompts and settings at different times. What has no "
    "interval is a median over runs; numbers of tokens, mismatches, near-ties and flips are sums over runs, of the "
    "same prompts in each.",
    "ci95": "Percentile bootstrap over runs and prompts, 2,000 resamples: runs are drawn, and prompts once for all of "
    "them, since every run has the same prompts and three runs are not three times as many; for alpha all prompts of "
    "one document stay together. None for a single prompt.",
}
"""What is said otherwise than of one run."""


def pool(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of results.json for `runs` that `check_poolable` let pass; each one's own rows stand in `runs`."""
    each = [Report.model_validate(run) for run in runs]
    environment, seed = each[0].environment, each[0].environment["seed"]
    lengths = [run.sweeps.num_draft_tokens for run in each]
    curves = [run.sweeps.temperature for run in each]
    return {
        **runs[0],
        "environment": {**environment, "report_seconds": sum(run.environment["report_seconds"] for run in each)},
        "definitions": {**each[0].definitions, **DEFINITIONS},
        "headline": [one.model_dump() for one in pooled_contests(each)],
        "unquantised": [],
        "rows": matched([run.rows for run in each], row_key, lambda rows: pooled_row(rows, seed)),
        **pooled_energy(runs, seed),
        "peers": matched([run.peers for run in each], peer_key, lambda peers: _peer(peers, seed)),
        "arms": matched([run.arms for run in each], arm_key, lambda arms: medians(arms, "tokens_per_s")),
        "sweeps": {
            "num_draft_tokens": {
                **lengths[0].model_dump(),
                "points": matched([one.points for one in lengths], length_key, lambda points: _length(points, seed)),
            },
            "temperature": {
                **curves[0].model_dump(),
                "points": matched([one.points for one in curves], point_key, lambda points: medians(points, *_CURVE)),
            },
        },
        "runs": [{name: run[name] for name in _OF_A_RUN if name in run} for run in runs],
    }


def peer_key(peer: AssistedPeer) -> tuple[Any, ...]:
    """The best setting is each run's own; those that were tried are told apart."""
    return peer.temperature, peer.best, None if peer.best else str(peer.setting)


def matched(
    runs: Sequence[Sequence[One]], key: Callable[[One], Any], pooled: Callable[[list[One]], One]
) -> list[dict[str, Any]]:
    """`pooled` of the entries that have the same key in every run, in the order of the first; as results.json has
    them, without what no run wrote."""
    tables = [{key(one): one for one in run} for run in runs]
    return [pooled([table[name] for table in tables]).model_dump(exclude_unset=True) for name in tables[0]]


def pooled_row(each: Sequence[Row], seed: int) -> Row:
    """The row of several runs from theirs."""
    estimates = [described(name, _estimate(each, *made_of, seed)) for name, made_of in _PAIRS.items()]
    found = {
        **{name: value for one in estimates for name, value in one.items()},
        **{name: _sum([getattr(row, name) for row in each]) for name in _SUMS},
        **dict.fromkeys(
            [*(field for field, _ in _PAIRS.values()), "joules_by_prompt", "tau_by_context"]
        ),  # each run's own
        **_energy(each, seed),
        "baseline": " or ".join(sorted({row.baseline for row in each})),
        "acceptance_by_position": [
            _median(column) for column in zip(*(row.acceptance_by_position for row in each), strict=True)
        ],
        "itl_s": medians([row.itl_s for row in each], "p50", "p95"),
        "component_times": _times([row.component_times for row in each]),
        "peak_memory_bytes": max(row.peak_memory_bytes for row in each),
        "speedup_by_run": [row.speedup for row in each],
        "realised_ci95": None,  # over the prompts of one process; between processes the ratio moves by more
    }
    return medians(each, *_MEDIANS).model_copy(update=found)


def _energy(each: Sequence[Row], seed: int) -> dict[str, Any]:
    facts = same_facts([{"kind": row.energy_kind, "reason": row.energy_reason} for row in each])
    found = None if facts["kind"] is None else _estimate(each, "joules_by_prompt", median_of_ratios, seed)
    said = {"energy_kind": facts["kind"], "energy_reason": facts["reason"]}
    return {**described("energy_j_per_token", found), **said}


def _peer(each: Sequence[AssistedPeer], seed: int) -> AssistedPeer:
    found = medians(each, "tokens_per_s")
    if not found.best:
        return found
    by_run = {
        "ratio_by_run": [peer.ratio_ours_over_peer for peer in each],
        "settings_by_run": [peer.setting for peer in each],
        "seconds_by_prompt": None,
    }
    ratio = ours_over(_estimate(each, "seconds_by_prompt", median_of_ratios, seed))
    return found.model_copy(update={**ratio, **by_run})


def _length(each: Sequence[Row], seed: int) -> Row:
    tau = _estimate(each, "passes_by_prompt", ratio_of_sums, seed)
    found = {
        "tau": tau and tau.value,
        **described("speedup", _estimate(each, "seconds_by_prompt", median_of_ratios, seed)),
        **dict.fromkeys(("passes_by_prompt", "seconds_by_prompt")),
    }
    return medians(each, "tokens_per_s", "predicted_speedup", "realised").model_copy(update=found)


def _estimate(each: Sequence[BaseModel], field: str, statistic: Statistic, seed: int) -> Estimate | None:
    """Over runs and prompts; None where no prompt is known in every run."""
    runs = [[pair or (np.nan, np.nan) for pair in getattr(one, field) or []] for one in each]
    pairs = np.array(runs, dtype=float).reshape(len(runs), -1, 2)
    known = pairs[:, np.isfinite(pairs).all((0, 2))]
    if not known.size:
        return None
    found = bootstrap_crossed(known, statistic, seed)
    return found if known.shape[1] > 1 else Estimate(found.value, None)  # runs alone say nothing of other prompts


def medians(each: Sequence[One], *names: str) -> One:
    """The first entry with these fields as medians over all."""
    return each[0].model_copy(update={name: _median([getattr(one, name) for one in each]) for name in names})


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None


def _sum(values: Sequence[int | None]) -> int | None:
    return None if None in values else sum(value or 0 for value in values)


def _times(each: Sequence[ComponentTimes | None]) -> ComponentTimes | None:
    known = [one for one in each if one is not None]
    return medians(known, "t_target_1_s", "t_target_k1_s", "t_draft_s") if known else None
