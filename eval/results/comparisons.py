"""Runs of one comparison at different times, made one: what differs between processes has an interval over runs and
batches of prompts, and stands beside the least and the most of the runs. Its mode says what it is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.common.checked_json import shown
from decode.common.errors import InputError
from eval.results.compared import Comparison
from eval.results.energy import pooled_energy
from eval.results.poolable import check_different_runs, check_same, check_single
from eval.results.pooling import DEFINITIONS, matched, pooled_row, row_key
from eval.results.schema import Row
from eval.results.statistics import arm_ratio, arm_ratio_of_runs, arm_speed, described, finite

Run = Mapping[str, Any]
Others = Callable[[Sequence[Run]], Mapping[str, str]]
"""Ratio -> the arm that others are held against in runs of one cell."""


_EQUAL = ("drafts", "prompts", "settings", "targets", "arms")
"""What is equal in runs of one comparison, of what its mode writes."""


def check_comparisons(files: Sequence[Path], runs: Sequence[Run]) -> None:
    """Raise InputError naming two of `files` and both values where `runs` do not time the same arms on the same
    prompts."""
    for file, run in zip(files, runs, strict=True):
        check_single(file, run)
    first, *others = (_compared(run) for run in runs)
    choices = f"{first['mode']}.choices"
    hints = {"choices": f"; settings that were chosen anew in every run are fixed by {choices}=RUN1/results.json"}
    for file, other in zip(files[1:], others, strict=True):
        check_same(files[0], first, file, other, hints)
    check_different_runs(files, [f"after {run['environment']['report_seconds']} s of timing" for run in runs])


def _compared(run: Run) -> dict[str, Any]:
    found = Comparison.model_validate(run)
    return {
        "mode": found.mode,
        "target": {name: run["target"].get(name) for name in ("fingerprint", "dtype", "quantization")},
        **{name: run[name] for name in _EQUAL if name in run},
        "choices": [(one.batch_size, one.temperature, one.text, one.best) for one in found.choices],
        "cells": [
            ((one.batch_size, one.temperature, one.text), one.prompts, sorted(arm.arm for arm in one.arms))
            for one in found.cells
        ],
        "rows": sorted(str(_row_key(row)) for row in found.rows),
    }


def pooled_comparison(runs: Sequence[Run], others: Others) -> dict[str, Any]:
    """What every comparison's results.json holds, for `runs` that `check_comparisons` let pass."""
    each = [Comparison.model_validate(run) for run in runs]
    environment, seed = each[0].environment, each[0].environment["seed"]
    return {
        **runs[0],
        "environment": {**environment, "report_seconds": sum(run.environment["report_seconds"] for run in each)},
        "definitions": {**each[0].definitions, **DEFINITIONS},
        "rows": matched([run.rows for run in each], _row_key, lambda rows: pooled_row(rows, seed)),
        **pooled_energy(runs, seed),
        "cells": [_cell(cells, others(cells), seed) for cells in cells_of_runs(runs)],
        "runs": [{"environment": run.environment} for run in each],
    }


def cell_with_ratios(cell: Run, others: Others, seed: int) -> dict[str, Any]:
    """A timed cell without its rows, with every arm's speed and its ratios over `others`."""
    against = others([cell])
    arms = [
        {
            **one,
            "tokens_per_s": arm_speed([cell], one["arm"]),
            **{
                key: value
                for name, other in against.items()
                for key, value in described(name, arm_ratio([cell], one["arm"], other, seed)).items()
            },
        }
        for one in cell["arms"]
    ]
    return {**{key: value for key, value in cell.items() if key not in ("rows", "energy")}, "arms": arms}


def check_same_comparison(setting: str, file: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """InputError unless `file`, the value of `setting`, is of what `wanted` names: choices of other arms, or made for
    other models, would be timed as if they were the best here."""
    for name, here in wanted.items():
        if known.get(name) != here:
            raise InputError(
                f"{setting}={file} is of {name} {shown(known.get(name))}, and this run is of {shown(here)}: "
                "what was chosen there need not be the best here. Name a run of the same comparison, or leave out "
                f"{setting} to choose anew"
            )


def cells_of_runs(runs: Sequence[Run]) -> list[list[Run]]:
    """Each cell of the first run, beside those of the others that are about the same."""
    return [[matching(run["cells"], about, about(cell)) for run in runs] for cell in runs[0]["cells"]]


def _cell(each: Sequence[Run], others: Mapping[str, str], seed: int) -> dict[str, Any]:
    """All batches of all runs, one run after another."""
    arms = [[matching(cell["arms"], lambda one: one["arm"], arm["arm"]) for cell in each] for arm in each[0]["arms"]]
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
        by_run = [arm_ratio([cell], name, other, seed) for cell in cells]  # over one arm, whichever a run had over
        found[f"{key}_by_run"] = [None if one is None else finite(one.value) for one in by_run]
    return found


def about(one: Run) -> tuple[Any, ...]:
    """What a cell, a choice or a peer is about; a choice may be for all texts."""
    return one["batch_size"], one["temperature"], one.get("text")


def _row_key(row: Row) -> tuple[Any, ...]:
    return *row_key(row), row.setting, row.text


def matching(entries: Sequence[Run], key: Any, wanted: Any) -> Run:
    """The first entry with that key."""
    return next(one for one in entries if key(one) == wanted)
