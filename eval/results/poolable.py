"""Whether runs may be pooled: they measured the same things, and are not one run twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.common.checked_json import shown
from decode.common.errors import InputError
from eval.results.pooling import arm_key, length_key, point_key, row_key
from eval.results.reported import Report

_WANTED = ("settings", "fingerprints")
_PARTS: dict[str, Callable[[Report], list[Any]]] = {
    "rows": lambda run: sorted(map(str, map(row_key, run.rows))),
    "arms": lambda run: sorted(map(str, map(arm_key, run.arms))),
    "draft lengths": lambda run: sorted((length_key(one),) for one in run.sweeps.num_draft_tokens.points),
    "temperatures of the curve": lambda run: sorted(map(point_key, run.sweeps.temperature.points)),
    "peers": lambda run: sorted(
        (one.temperature, one.best, "" if one.best else str(one.setting), one.version) for one in run.peers
    ),
    "documents behind alpha": lambda run: [len(row.alpha_by_document or []) for row in run.rows],
}
"""What has to be there in every run, since it is matched by what it is about."""
_HINTS = {
    "settings.decode.num_draft_tokens": "; a length that timing.choose_k chose anew in every run is fixed by "
    "timing.choose_k=[] decode.num_draft_tokens=K"
}
"""Setting -> how to have it equal, as a clause."""


def check_poolable(files: Sequence[Path], runs: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError naming two of `files` and both values where `runs` are not runs of one report at different
    times."""
    for file, run in zip(files, runs, strict=True):
        _check_alone(file, run)
    (first, *others), each = files, [Report.model_validate(run) for run in runs]
    for file, other in zip(others, each[1:], strict=True):
        check_same(first, _compared(each[0]), file, _compared(other), _HINTS)
    check_different_runs(files, [f"which began at {one.environment['started']}" for one in each])


def check_different_runs(files: Sequence[Path], known_by: Sequence[str]) -> None:
    """Raise InputError where two of `files` say the same of when they were measured, a clause each."""
    seen: dict[str, Path] = {}
    for file, when in zip(files, known_by, strict=True):
        if when in seen:
            raise InputError(
                f"{seen[when]} and {file} are one run, {when}: counted twice it would look like two that agree. Name "
                "each run once"
            )
        seen[when] = file


def check_single(file: Path, run: Mapping[str, Any]) -> None:
    """Raise InputError for a file that holds several runs."""
    if "runs" in run:
        raise InputError(f"{file} is pooled already, from {len(run['runs'])} runs; name the results.json of the runs")


def _check_alone(file: Path, run: Mapping[str, Any]) -> None:
    if run["mode"] != "report":
        raise InputError(f"{file} is of mode={run['mode']}, and reports alone are pooled; publish it by itself")
    if not run["rows"]:
        raise InputError(f"{file} holds no row, so it measured nothing; name reports of the same drafts")
    check_single(file, run)
    missing = [name for name in _WANTED if name not in run]
    missing += [] if "started" in run["environment"] else ["environment.started"]
    if missing:
        raise InputError(
            f"{file} lacks {', '.join(missing)}, by which runs are told to be of one report: an earlier version wrote "
            "it. Measure it again, or publish it by itself"
        )


def check_same(
    file: Path, ours: Mapping[str, Any], other_file: Path, theirs: Mapping[str, Any], hints: Mapping[str, str]
) -> None:
    """Raise InputError naming the first thing that differs, both values, and its hint, a clause."""
    for key in [*ours, *(theirs.keys() - ours.keys())]:
        here, there = ours.get(key, "unset"), theirs.get(key, "unset")
        if here != there:
            raise InputError(
                f"{file} and {other_file} are not runs of one report: {key} is {shown(here)} in the first and "
                f"{shown(there)} in the second. Pool runs of one target, the same drafts, prompts and "
                f"settings{hints.get(key, '')}"
            )


def _compared(run: Report) -> dict[str, Any]:
    target = {f"target.{name}": getattr(run.target, name) for name in ("fingerprint", "dtype", "quantization")}
    drafts = {f"drafts.{name}": value for name, value in run.fingerprints.items()}
    prompts = {
        f"prompts.{name}": getattr(run.prompts, name) for name in ("sha256", "timed", "max_new_tokens", "rounds")
    }
    parts = {name: part(run) for name, part in _PARTS.items()}
    return {**target, **drafts, **prompts, **_flat(run.settings, "settings"), **parts}


def _flat(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict) or not content:
        return {where: content}
    return {key: value for name, one in content.items() for key, value in _flat(one, f"{where}.{name}").items()}
