"""Given drafts, ours and published ones, measured beside the arms of mode=families."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eval import stage
from eval.modes.families.page import page_of
from tests.decode.published_folders import PUBLISHED
from tests.eval.test_families import LM, config
from tests.eval.test_families import folder as folder  # fixtures
from tests.eval.test_families import trainer as trainer
from tests.tiny import save_tiny_target


@pytest.mark.slow
def test_given_drafts_are_measured_beside_the_arms(
    folder: Path, tmp_path: Path, trainer: object, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_target(tmp_path / "mine", seed=3, hidden_size=16, num_layers=1)
    medusa = PUBLISHED["FasterDecoding"][0](tmp_path / "theirs", torch.zeros(0))
    changes = {"arms": {"lm": LM}, "seeds": [0], "engine": "vllm"}
    drafts = {"mine": str(tmp_path / "mine"), "theirs": str(medusa)}
    stage.run(config(folder, tmp_path, families=changes, drafts=drafts))
    place = tmp_path / "families/report"
    found = json.loads((place / "results.json").read_text())
    assert [(one["arm"], one["budget"]) for one in found["trainings"]] == [("lm", "tokens"), ("lm", "time")]
    rows = {(one["arm"], one["shape"]): one for one in found["quality"] if one["budget"] == "given"}
    assert set(rows) == {(name, shape) for name in drafts for shape in ("chain", "tree")}
    assert all(row["mismatches"] == 0 and row["tau"] >= 1 for row in rows.values())
    assert {row["draft"] for row in found["rows"]} == {"lm", "mine", "theirs"}
    assert found["arms"]["theirs"]["folder"] == str(medusa)
    assert (found["arms"]["theirs"]["family"], found["arms"]["theirs"]["taps"]) == ("medusa", [-1])
    assert found["arms"]["theirs"]["refusals"]["vllm"] is None
    assert found["arms"]["theirs"]["refusals"]["sglang"] is not None
    summary = (place / "summary.md").read_text()
    assert summary == page_of(found).markdown()
    assert "## Given drafts" in summary
    assert str(medusa) in summary
    before = {file.name: file.stat().st_mtime_ns for file in (place / "drafts").iterdir()}
    assert {"mine-given-0.json", "theirs-given-0.json"} < set(before)


def test_the_plan_names_them(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    medusa = PUBLISHED["TGI"][0](tmp_path / "theirs", torch.zeros(0))
    stage.run(config(folder, tmp_path, drafts={"theirs": str(medusa)}, plan=True))
    assert f"theirs: 6,336 parameters, reads target layers [-1] (given, not trained here: {medusa})" in (
        capsys.readouterr().out
    )
