"""Runs of one comparison at different times, made one: what differs between processes has an interval over runs and
batches of prompts, and stands beside the least and the most of the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.common.errors import InputError
from eval.arms.base import OURS, our_name
from eval.modes.decoders.results import compared_arms
from eval.results.figures import described
from eval.results.poolable import check_different_runs, check_same
from eval.results.pooling import DEFINITIONS, medians, pooled_row, row_key
from eval.results.statistics import arm_ratio_of_runs, arm_speed

Run = Mapping[str, Any]


def check_comparisons(files: Sequence[Path], runs: Sequence[Run]) -> None:
    """Raise InputError naming two of `files` and both values where `runs` do not time the same arms on the same
    prompts."""
    for file, run in zip(files, runs, strict=True):
        if "runs" in run:
            raise InputError(
                f"{file} is pooled already, from {len(run['runs'])} runs; name the results.json of the runs"
            )
    for file, other in zip(files[1:], runs[1:], strict=True):
        check_same(files[0], _compared(runs[0]), file, _compared(other), _HINTS)
    check_different_runs(files, [f"after {run['environment']['report_seconds']} s of timing" for run in runs])


_HINTS = {"choices": "; settings that were chosen anew in every run are fixed by decoders.choices=RUN1/results.json"}
"""What was compared -> how to have it equal, as a clause."""


def _compared(run: Run) -> dict[str, Any]:
    return {
        "mode": run["mode"],
        "target": {name: run["target"][name] for name in ("fingerprint", "dtype")},
        **{name: run[name] for name in ("drafts", "prompts", "settings")},
        "choices": [(*_point(one), one["best"]) for one in run["choices"]],
        "cells": [(_about(one), one["prompts"], sorted(arm["arm"] for arm in one["arms"])) for one in run["cells"]],
        "rows": sorted(str(_row_key(row)) for row in run["rows"]),
    }


def pool_comparisons(runs: Sequence[Run]) -> dict[str, Any]:
    """The content of results.json for `runs` that `check_comparisons` let pass."""
    first, seed = runs[0], runs[0]["environment"]["seed"]
    cells = [[_of(run["cells"], _about, _about(cell)) for run in runs] for cell in first["cells"]]
    rows = [[_of(run["rows"], _row_key, _row_key(row)) for run in runs] for row in first["rows"]]
    peers = [[_of(run["peers"], _peer_key, _peer_key(peer)) for run in runs] for peer in first["peers"]]
    seconds = sum(run["environment"]["report_seconds"] for run in runs)
    return {
        **first,
        "environment": {**first["environment"], "report_seconds": seconds},
        "definitions": {**first["definitions"], **DEFINITIONS},
        "rows": [pooled_row(each, seed) for each in rows],
        "peers": [_peer(each, cells, first["choices"], seed) for each in peers],
        "cells": [_cell(each, seed) for each in cells],
        "runs": [{"environment": run["environment"]} for run in runs],
    }


def _cell(each: Sequence[Run], seed: int) -> dict[str, Any]:
    """All batches of all runs, one run after another."""
    arms = [[_of(cell["arms"], lambda one: one["arm"], arm["arm"]) for cell in each] for arm in each[0]["arms"]]
    others = compared_arms(each)
    return {
        **each[0],
        "seconds": sum(cell["seconds"] for cell in each),
        "arms": [_arm(one, each, others, seed) for one in arms],
    }


def _arm(each: Sequence[Run], cells: Sequence[Run], others: Mapping[str, str], seed: int) -> dict[str, Any]:
    name = each[0]["arm"]
    found: dict[str, Any] = {
        "arm": name,
        **{key: [one for arm in each for one in arm[key]] for key in ("seconds_per_token", "call_seconds_per_token")},
        "tokens": sum(arm["tokens"] for arm in each),
        "tokens_per_s": arm_speed(cells, name),
    }
    for key, other in others.items():
        found |= described(key, arm_ratio_of_runs(cells, name, other, seed))
        found[f"{key}_by_run"] = [arm.get(key) for arm in each]
    return found


def _peer(each: Sequence[Run], cells: Sequence[Sequence[Run]], choices: Sequence[Run], seed: int) -> dict[str, Any]:
    best = next(one["best"] for one in choices if _point(one) == _point(each[0]))
    (of_peer,) = [runs for runs in cells if _about(runs[0]) == _about(each[0])]
    ratio = described("ratio", arm_ratio_of_runs(of_peer, our_name(best[OURS]), each[0]["name"], seed))
    return {
        **medians(each, "tokens_per_s"),
        "ratio_ours_over_peer": ratio["ratio"],
        "ratio_ci95": ratio["ratio_ci95"],
        "ratio_by_run": [peer["ratio_ours_over_peer"] for peer in each],
    }


def _point(one: Run) -> tuple[Any, ...]:
    return one["batch_size"], one["temperature"]


def _about(one: Run) -> tuple[Any, ...]:
    return *_point(one), one["text"]


def _peer_key(peer: Run) -> tuple[Any, ...]:
    return *_about(peer), peer["name"]


def _row_key(row: Run) -> tuple[Any, ...]:
    return *row_key(row), row["setting"], row["text"]


def _of(entries: Sequence[Run], key: Any, wanted: Any) -> Run:
    return next(one for one in entries if key(one) == wanted)
