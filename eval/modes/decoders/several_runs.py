"""Runs of one comparison of decoders at different times, made one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.arms.base import OURS, our_name
from eval.modes.decoders.results import compared_arms
from eval.results.comparisons import about, cells_of_runs, check_runs, matching, pooled_comparison
from eval.results.figures import described
from eval.results.pooling import medians
from eval.results.statistics import arm_ratio_of_runs

Run = Mapping[str, Any]


def check_comparisons(files: Sequence[Path], runs: Sequence[Run]) -> None:
    """Raise InputError naming two of `files` and both values where `runs` do not time the same arms on the same
    prompts."""
    check_runs(files, runs, ("settings",), "decoders.choices")


def pool_comparisons(runs: Sequence[Run]) -> dict[str, Any]:
    """The content of results.json for `runs` that `check_comparisons` let pass."""
    first, cells = runs[0], cells_of_runs(runs)
    peers = [[matching(run["peers"], _peer_key, _peer_key(peer)) for run in runs] for peer in first["peers"]]
    return {
        **pooled_comparison(runs, compared_arms),
        "peers": [_peer(each, cells, first["choices"], first["environment"]["seed"]) for each in peers],
    }


def _peer(each: Sequence[Run], cells: Sequence[Sequence[Run]], choices: Sequence[Run], seed: int) -> dict[str, Any]:
    best = next(one["best"] for one in choices if about(one)[:2] == about(each[0])[:2])
    (of_peer,) = [runs for runs in cells if about(runs[0]) == about(each[0])]
    ratio = described("ratio", arm_ratio_of_runs(of_peer, our_name(best[OURS]), each[0]["name"], seed))
    return {
        **medians(each, "tokens_per_s"),
        "ratio_ours_over_peer": ratio["ratio"],
        "ratio_ci95": ratio["ratio_ci95"],
        "ratio_by_run": [peer["ratio_ours_over_peer"] for peer in each],
    }


def _peer_key(peer: Run) -> tuple[Any, ...]:
    return *about(peer), peer["name"]
