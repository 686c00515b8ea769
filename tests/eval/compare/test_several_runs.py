"""Runs of one comparison of decoders: what is pooled how, what is refused, and settings taken from an earlier run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from decode.common.errors import InputError
from decode.common.typed_config import build
from eval.config import EvalConfig
from eval.measure.cells import Point
from eval.modes.compare.arm_set import Choices, Target
from eval.modes.compare.decoders import Decoders
from eval.modes.compare.mode import given_choices
from eval.modes.compare.page import page_of
from eval.modes.compare.results import pool_comparisons
from eval.publish import publish
from eval.results.comparisons import _arm, check_comparisons
from eval.results.schema import LATER, read_results
from eval.results.statistics import arm_ratio
from tests.commands import ROOT

FILES = [Path(f"{name}/results.json") for name in "abc"]
OURS = "own autoregressive loop"


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """Two points of a comparison that was published, of one text, without what several runs add to it."""
    results = read_results(ROOT / "docs/results/decoders.json")
    for part in ("rows", "peers", "cells"):
        results[part] = [one for one in results[part] if one["batch_size"] in (1, 4) and one["text"] == "code"]
    results["choices"] = [one for one in results["choices"] if one["batch_size"] in (1, 4)]
    unknown = dict.fromkeys(LATER)
    results["rows"] = [unknown | row | {"passes_by_prompt": [[row["tau"] * 9, 9]]} for row in results["rows"]]
    del results["runs"]
    for cell in results["cells"]:
        for number, arm in enumerate(cell["arms"]):
            times = [(1 + 0.1 * (batch + number) % 0.3) / arm["tokens_per_s"] for batch in range(4)]
            arm |= {"seconds_per_token": times, "call_seconds_per_token": times}
        for arm in cell["arms"]:
            ratio = arm_ratio([cell], arm["arm"], "transformers generate", 0)
            arm["over_transformers"] = None if ratio is None else ratio.value
    return results


@pytest.fixture
def runs(one: dict[str, Any]) -> list[dict[str, Any]]:
    """A test may change them."""
    return three_runs(one)


@pytest.fixture(scope="module")
def pooled(one: dict[str, Any]) -> dict[str, Any]:
    """As one comparison, which no test changes."""
    return pool_comparisons(three_runs(one))


def three_runs(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Three times the same, at another pace; in the second our loop took twice as long."""
    found = []
    for number, pace in enumerate([1.0, 1.2, 0.9]):
        run = copy.deepcopy(one)
        run["environment"]["report_seconds"] = 1000.0 + number
        for cell in run["cells"]:
            for arm in cell["arms"]:
                slower = pace * (2 if number == 1 and arm["arm"] == OURS else 1)
                arm["seconds_per_token"] = [None if x is None else x * slower for x in arm["seconds_per_token"]]
                for key in ("over_transformers", "over_autoregressive", "over_assisted", "over_vllm"):
                    if number == 1 and arm["arm"] == OURS and arm.get(key) and key != "over_autoregressive":
                        arm[key] /= 2
        found.append(run)
    return found


def test_ratios_are_pooled_over_runs_and_batches_and_given_by_run(
    runs: list[dict[str, Any]], pooled: dict[str, Any]
) -> None:
    check_comparisons(FILES, runs)
    for number, cell in enumerate(pooled["cells"]):
        (arm,) = [arm for arm in cell["arms"] if arm["arm"] == OURS]
        alone = [next(one for one in run["cells"][number]["arms"] if one["arm"] == OURS) for run in runs]
        assert arm["over_transformers_by_run"] == pytest.approx([one["over_transformers"] for one in alone])
        assert min(arm["over_transformers_by_run"]) < arm["over_transformers"]
        theirs, ours = (
            np.array([_seconds(run["cells"][number], name) for run in runs]) for name in ("transformers generate", OURS)
        )
        assert arm["over_transformers"] == pytest.approx(np.median(theirs / ours))
        low, high = arm["over_transformers_ci95"]
        assert low <= alone[0]["over_transformers"] / 2 * 1.2  # the slow run drawn twice or more
        assert high >= arm["over_transformers"]
        assert len(arm["seconds_per_token"]) == 3 * len(alone[0]["seconds_per_token"])


def test_every_run_is_held_against_the_arm_of_the_pooled_ratio() -> None:
    """In the second run another arm was the faster one without a draft."""
    paces = [{"a": 0.4, "b": 0.5, "ours": 0.1}, {"a": 0.6, "b": 0.5, "ours": 0.1}]
    cells = [
        {
            "arms": [
                {"arm": name, "seconds_per_token": [pace] * 3, "call_seconds_per_token": [pace] * 3, "tokens": 9}
                for name, pace in run.items()
            ]
        }
        for run in paces
    ]
    found = _arm([cell["arms"][2] for cell in cells], cells, {"over_plain": "a"}, 0)
    assert found["over_plain_by_run"] == pytest.approx([4.0, 6.0])


def _seconds(cell: dict[str, Any], arm: str) -> list[float]:
    return next(one["seconds_per_token"] for one in cell["arms"] if one["arm"] == arm)


def test_the_page_says_what_each_run_found(runs: list[dict[str, Any]], pooled: dict[str, Any]) -> None:
    page = page_of(pooled).markdown()
    assert "by run" in page
    assert "over runs and batches of prompts" in page
    alone = page_of(runs[0]).markdown()
    assert "by run" not in alone


def test_pooled_runs_are_published_with_their_page(runs: list[dict[str, Any]], tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.json" for number in range(3)]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(run))
    publish(files, tmp_path / "docs/decoders", tmp_path / "README.md")
    assert len(json.loads((tmp_path / "docs/decoders.json").read_text())["runs"]) == 3
    with pytest.raises(InputError, match="pooled already"):
        publish([tmp_path / "docs/decoders.json", files[0]], tmp_path / "docs/again")


def _other_choice(run: dict[str, Any]) -> None:
    run["choices"][0]["best"]["ours"] = "chain8"


def _other_settings(run: dict[str, Any]) -> None:
    run["settings"]["chain2"] = {"num_draft_tokens": 3}


def _no_cell(run: dict[str, Any]) -> None:
    del run["cells"][0]


def _same_run(run: dict[str, Any]) -> None:
    run["environment"]["report_seconds"] = 1000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_choice, "choices.*decoders.choices=RUN1"),
        (_other_settings, "settings"),
        (_no_cell, "cells"),
        (_same_run, "a/results.json and b/results.json are one run"),
    ],
)
def test_runs_of_other_things_are_refused(runs: list[dict[str, Any]], change: Any, message: str) -> None:
    change(runs[1])
    with pytest.raises(InputError, match=f"(?s){message}"):
        check_comparisons(FILES, runs)


def _given(cfg: EvalConfig) -> Choices:
    """For a target of which its path alone is known."""
    description: Any = SimpleNamespace(path=cfg.target.path)
    return given_choices(Decoders(cfg), [Target("target", cfg.target, description, ("code",), {}, 64)])


def _config(results: dict[str, Any], file: Path, **changes: Any) -> EvalConfig:
    decoders = {"arms": results["settings"], "batch_sizes": [1, 4], "batches_timed": [1, 1], "choices": str(file)}
    settings = {
        "mode": "decoders",
        "target": {"path": results["target"]["path"]},
        "drafts": results["drafts"],
        "temperatures": [1.0, 0.0],
        "decoders": {**decoders, **changes.pop("decoders", {})},
    }
    return build(EvalConfig, settings | changes)


def test_settings_are_taken_from_an_earlier_run(one: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(one))
    found = _given(_config(one, file))
    assert sorted((point.batch_size, point.temperature) for point in found) == [(1, 0.0), (1, 1.0), (4, 0.0), (4, 1.0)]
    wanted = next(x for x in one["choices"] if (x["batch_size"], x["temperature"]) == (4, 1.0))
    assert found[Point(4, 1.0)]["best"] == wanted["best"]
    assert _given(_config(one, file, decoders={"choices": None})) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoders": {"batch_sizes": [3], "batches_timed": [1]}}, "nothing for batch3-T1, batch3-T0"),
        ({"decoders": {"arms": {"chain4": {"num_draft_tokens": 4}}}}, "of settings .*choose anew"),
        ({"target": {"path": "another"}}, "of targets .*another"),
        ({"drafts": {"distilled": "another"}}, "of drafts .*another"),
    ],
)
def test_choices_of_another_comparison_are_refused(
    one: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(one))
    with pytest.raises(InputError, match=message):
        _given(_config(one, file, **changes))
