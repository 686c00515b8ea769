"""Ratios of arms as results.json keeps them, and training curves as their runs left them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode.common.errors import InputError
from eval.arms.base import AUTOREGRESSIVE, TRANSFORMERS
from eval.measure.cells import arm_times
from eval.modes.compare.peers import over_others, peers
from eval.modes.families.results import _cell as cell_of_families
from eval.render.plots import series, training_curves
from eval.results.compared import Choice, Comparison, TimedCell
from eval.results.comparisons import cell_with_ratios
from eval.results.statistics import arm_ratio, arm_seconds, arm_speed, fastest_arm
from tests.eval.samples import at_paces, sample


def cell(**paces: Sequence[float | None]) -> dict[str, Any]:
    return {"arms": [{"arm": name, "seconds_per_token": list(values)} for name, values in paces.items()]}


FIRST = cell(ours=[0.1, 0.1, None], other=[0.2, 0.3, 0.4])
SECOND = cell(ours=[0.1, 0.5], other=[0.7, 0.5], third=[0.01, 0.01])


def test_a_ratio_is_the_others_time_over_ours_by_the_median_of_all_pairs() -> None:
    found = arm_ratio([FIRST, SECOND], "ours", "other", 0)
    assert found is not None
    assert found.value == pytest.approx(2.5)  # of 2, 3, 7 and 1; what has no time on either side is left out
    assert found.ci95 == pytest.approx((1.0, 7.0))
    assert arm_ratio([SECOND], "ours", "none", 0) is None
    assert arm_ratio([cell(ours=[None], other=[1.0])], "ours", "other", 0) is None


def test_cells_in_which_one_of_the_two_did_not_run_are_left_out() -> None:
    found = arm_ratio([FIRST, SECOND], "third", "other", 0)
    assert found is not None
    assert found.value == pytest.approx((70 + 50) / 2)


def test_a_speed_is_the_median_over_all_batches() -> None:
    assert arm_speed([FIRST, SECOND], "ours") == pytest.approx(10.0)  # of 10, 10, 10 and 2
    assert arm_speed([FIRST, SECOND], "other") == pytest.approx(1 / 0.4)
    assert arm_speed([FIRST], "none") is None
    assert arm_speed([cell(ours=[None])], "ours") is None
    assert np.isnan(arm_seconds(FIRST, "ours")).tolist() == [False, False, True]  # type: ignore[arg-type]


def test_the_faster_of_several_has_most_tokens_per_second() -> None:
    assert fastest_arm([FIRST, SECOND], ["ours", "other", "none"]) == "ours"
    assert fastest_arm([FIRST], ["none"]) is None


def test_kept_times_are_seconds_per_token_with_and_without_the_prompt() -> None:
    samples = {"a": [*at_paces(0.1, first_s=1.2), [sample([[1]], first_s=0.5)]]}
    kept = arm_times("a", samples)
    assert kept["seconds_per_token"] == [pytest.approx(0.1), None]
    assert kept["call_seconds_per_token"] == pytest.approx([2.2 / 11, 0.5])
    assert kept["tokens"] == 12


def whole_cell() -> dict[str, Any]:
    arms = {AUTOREGRESSIVE: 0.4, TRANSFORMERS: 0.5, "transformers assisted": 0.25, "ours, a": 0.1, "ours, b": 0.05}
    place = {"batch_size": 1, "temperature": 1.0, "text": "code", "prompts": 1, "rows": [], "vllm_version": None}
    return {**cell(**{name: [pace] for name, pace in arms.items()}), **place}


def test_every_arm_of_a_cell_is_held_against_the_three_that_are_asked_about() -> None:
    over = {one["arm"]: one for one in cell_with_ratios(whole_cell(), over_others, 0)["arms"]}
    figures = [over["ours, a"][f"over_{name}"] for name in ("transformers", "autoregressive", "assisted")]
    assert figures == pytest.approx([5.0, 4.0, 2.5])
    assert over[TRANSFORMERS]["over_autoregressive"] == pytest.approx(0.8)
    assert over["ours, b"]["tokens_per_s"] == pytest.approx(20.0)


def test_arms_are_held_against_the_faster_of_vllms_where_it_ran() -> None:
    arms = cell(**{"vllm": [0.2, 0.2], "vllm, k=4": [0.1, 0.1], "vllm, k=8": [0.4, 0.4], "ours, a": [0.05, 0.05]})
    over = {one["arm"]: one["over_vllm"] for one in cell_with_ratios({**arms, "rows": []}, over_others, 0)["arms"]}
    assert (over["ours, a"], over["vllm, k=4"], over["vllm"]) == pytest.approx((2.0, 1.0, 0.5))
    assert not any("over_vllm" in one for one in cell_with_ratios(whole_cell(), over_others, 0)["arms"])


def test_peers_are_held_against_our_best_setting() -> None:
    untried: dict[str, Any] = {"tokens_per_s": {}, "prompts": 0, "seconds": 0.0}
    results = Comparison.model_construct(
        environment={"seed": 0, "packages": {"transformers": "5"}},
        choices=[
            Choice(batch_size=8, temperature=1.0, best={"ours": "b"}, **untried),
            Choice(batch_size=1, temperature=1.0, best={"ours": "a", "transformers assisted": "k=3"}, **untried),
        ],
        cells=[TimedCell.model_validate(cell_with_ratios(whole_cell(), over_others, 0))],
    )
    found = {one["name"]: one for one in peers(results, [[whole_cell()]])}
    assert set(found) == {TRANSFORMERS, "transformers assisted"}
    assert found["transformers assisted"]["ratio_ours_over_peer"] == pytest.approx(2.5)
    assert found["transformers assisted"]["setting"] == "k=3"
    assert found[TRANSFORMERS]["tokens_per_s"] == pytest.approx(2.0)


def test_families_are_held_against_the_faster_way_without_a_draft() -> None:
    found = cell_of_families(whole_cell(), 0)
    assert found["baseline"] == AUTOREGRESSIVE
    over = {one["arm"]: one["over_baseline"] for one in found["arms"]}
    assert over["ours, a"] == pytest.approx(4.0)
    assert over[AUTOREGRESSIVE] == 1.0


LINES = [
    {"kind": "train", "step": 1, "loss": 4.0},
    {"kind": "validation", "step": 1, "loss": 9.0},
    {"kind": "train", "step": 2, "loss": 3.0, "alpha": 0.5},
    {"kind": "train", "step": 3, "loss": None},
]


def test_a_curve_is_of_one_kind_of_line() -> None:
    assert series(LINES, "train", "loss") == ([1, 2], [4.0, 3.0])
    assert series(LINES, "validation", "loss") == ([1], [9.0])
    assert series(LINES, "train", "alpha") == ([2], [0.5])


def test_metrics_are_looked_for_in_the_drafts_folder_and_then_in_its_runs(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "none/model").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    both = {"found": str(tmp_path / "model"), "none": str(tmp_path / "none/model")}
    assert training_curves(both) == {"found": LINES}
    (tmp_path / "model/metrics.jsonl").write_text(json.dumps(LINES[0]))
    assert training_curves(both) == {"found": LINES[:1]}
    (tmp_path / "model/metrics.jsonl").write_text(json.dumps(LINES[0]) + "\n{")
    with pytest.raises(InputError, match=r"metrics.jsonl:2 is not valid JSON"):
        training_curves(both)
