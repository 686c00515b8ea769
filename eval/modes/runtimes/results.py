"""From runs of `python -m distill` to results.json, and several such files made one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from decode.common.errors import InputError
from decode.models.load import ModelDescription
from eval.config import EvalConfig
from eval.results.document import heading, target_entry
from eval.results.energy import merged
from eval.results.poolable import check_different_runs, check_same

Run = Mapping[str, Any]
_COMPARED = ("target", "arms", "kinds", "common", "left_out")
DEFINITIONS = {
    "tokens_per_s": "Tokens that the target wrote over the seconds of writing them and of reading whole texts for p "
    "and hidden states, by the run's own clock (`spent` in the manifest of its records); the median of the rounds.",
    "starting_s": "Seconds of loading the target or of starting engines, which a long run pays once; not "
    "in tokens_per_s. Its median.",
    "wall_s": "Seconds of the whole command, imports and the reading of the corpus included; the median.",
    "ratio": "tokens_per_s over that of the first arm in the same round; the median, and the least to the most.",
    "equal_texts": "Share of the texts that are those of the first arm, token for token, in the same round; the least "
    "of the rounds.",
}


def make_results(
    cfg: EvalConfig, target: ModelDescription, left_out: Mapping[str, str], made: Sequence[dict[str, Any]], started: str
) -> dict[str, Any]:
    """The content of results.json; `made` has an entry for each round, kind and arm, with a hash of each text."""
    head = heading(cfg, sum(one["wall_s"] for one in made))
    head["environment"]["started"] = started
    kept = [_with_equal_texts(one, made, next(iter(cfg.runtimes.arms))) for one in made]
    return {
        **head,
        "target": target_entry(target, target.dtype_name),
        "arms": dict(cfg.runtimes.arms),
        "kinds": dict(cfg.runtimes.kinds),
        "common": list(cfg.runtimes.common),
        "left_out": dict(left_out),
        "definitions": DEFINITIONS,
        "rows": [],
        "made": kept,
        "energy": _energy(kept, cfg.seed),
        "speeds": speeds(kept, list(cfg.runtimes.arms)),
    }


def _energy(made: Sequence[Run], seed: int) -> list[dict[str, Any]]:
    """Of whole commands, all rounds together."""
    return merged((one["energy"] for one in made if "energy" in one), seed)


def _with_equal_texts(one: Run, made: Sequence[Run], first: str) -> dict[str, Any]:
    base = _of_first(one, made, first)
    pairs = list(zip(one["texts"], base["texts"], strict=True))
    share = sum(text == other for text, other in pairs) / len(pairs)
    return {**{name: value for name, value in one.items() if name != "texts"}, "equal_texts": share}


def _of_first(one: Run, made: Sequence[Run], first: str) -> Run:
    same = [each for each in made if (each["kind"], each["round"]) == (one["kind"], one["round"])]
    return next(each for each in same if each["arm"] == first)


def net(one: Run) -> float:
    """Tokens per second of writing and reading."""
    return one["tokens"] / (one["writing_s"] + one["reading_s"])


def speeds(made: Sequence[Run], arms: Sequence[str]) -> list[dict[str, Any]]:
    """By kind and arm, all rounds together; the first of `arms` is what others are held against."""
    found = []
    for kind, arm in sorted({(one["kind"], one["arm"]) for one in made}, key=lambda one: (one[0], arms.index(one[1]))):
        rounds = [one for one in made if (one["kind"], one["arm"]) == (kind, arm)]
        found.append(
            {
                "kind": kind,
                "arm": arm,
                "tokens_per_s": [net(one) for one in rounds],
                "ratios": [net(one) / net(_of_first(one, made, arms[0])) for one in rounds],
                "equal_texts": min(one["equal_texts"] for one in rounds),
                "tokens": rounds[0]["tokens"],
                **{n: median(one[n] for one in rounds) for n in ("writing_s", "reading_s", "starting_s", "wall_s")},
            }
        )
    return found


def check_runtimes(files: Sequence[Path], runs: Sequence[Run]) -> None:
    """Raise InputError naming two of `files` and both values where `runs` are not of one comparison."""
    for file, run in zip(files, runs, strict=True):
        if "runs" in run:
            raise InputError(f"{file} is pooled already; name the results.json of the runs")
    first = {name: runs[0][name] for name in _COMPARED}
    for file, other in zip(files[1:], runs[1:], strict=True):
        check_same(files[0], first, file, {name: other[name] for name in _COMPARED}, {})
    check_different_runs(files, [_when(run) for run in runs])


def _when(run: Run) -> str:
    about = run["environment"]
    return f"begun {about['started']}, after {about['report_seconds']} s of timing"


def pool_runtimes(runs: Sequence[Run]) -> dict[str, Any]:
    """Rounds of all runs, as those of one; for `runs` that `check_runtimes` let pass."""
    made = [{**one, "round": f"{number}/{one['round']}"} for number, run in enumerate(runs) for one in run["made"]]
    seconds = sum(run["environment"]["report_seconds"] for run in runs)
    return {
        **runs[0],
        "environment": {**runs[0]["environment"], "report_seconds": seconds},
        "made": made,
        "energy": _energy(made, runs[0]["environment"]["seed"]),
        "speeds": speeds(made, list(runs[0]["arms"])),
        "runs": [{"environment": run["environment"]} for run in runs],
    }
