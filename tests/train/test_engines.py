"""Real training on 2 CPU processes: what the engines share, what they shard, and that they all compute the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.toy import ROOT, command, head_config, head_settings, metrics, tiny_config, tiny_settings
from train.stage import run

RANKS = 2
LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS))


def launch(arguments: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def on_two_ranks(folder: Path, target: Path, records: Path, engine: str, **changes: Any) -> dict[str, Any]:
    """Settings of a run of 2 ranks whose steps read what one rank with twice the rows reads."""
    return tiny_settings(folder, target, records=str(records), engine={"name": engine}, batch_size=1, **changes)


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["ddp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"])
def test_two_ranks_train_as_one_would(tmp_path: Path, target: Path, records: Path, engine: str) -> None:
    run(tiny_config(tmp_path / "one", target, records=str(records), batch_size=2))
    settings = on_two_ranks(tmp_path / "two", target, records, engine)
    launch(command(settings, LAUNCHER, "tests.train.probe"))
    for ours, theirs in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["tokens"] == theirs["tokens"]
        for name in ("loss", "alpha", "tau"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), (engine, name)
    _check_shares(tmp_path / "two", engine)
    _check_same_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["ddp", "deepspeed_zero2", "deepspeed_zero3"])
def test_two_ranks_train_a_head_as_one_would(tmp_path: Path, target: Path, feature_records: Path, engine: str) -> None:
    """To tolerance: each rank takes the mean over its own slots, of which the ends of documents have fewer."""
    head = {"objective": {"credit": "decay"}, "head": {"vocab": 250}, "lr": 3e-3}  # at 1e-2 six steps part by 1.5 %
    source: dict[str, Any] = {"records": str(feature_records)} | head
    run(head_config(tmp_path / "one", target, **source, batch_size=2))
    changes: dict[str, Any] = source | {"engine": {"name": engine}, "batch_size": 1}
    launch(command(head_settings(tmp_path / "two", target, **changes), LAUNCHER, "tests.train.probe"))
    for ours, theirs in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for name in ("loss", "alpha", "tau"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-2), (engine, name)
    _check_shares(tmp_path / "two", engine)


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["deepspeed_zero2", "deepspeed_zero3"])
def test_deepspeed_resumes_its_sharded_state(tmp_path: Path, target: Path, records: Path, engine: str) -> None:
    settings = on_two_ranks(tmp_path / "whole", target, records, engine, keep_checkpoints=9)
    launch(command(settings, LAUNCHER))
    middle = tmp_path / "whole" / "checkpoints" / "step_00000003"
    settings |= {"output_dir": str(tmp_path / "rest"), "resume": str(middle)}
    launch(command(settings, LAUNCHER))
    ours, theirs = metrics(tmp_path / "whole"), metrics(tmp_path / "rest")
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.engines
def test_mixed_precision_and_a_live_target_work_under_zero_3(tmp_path: Path, target: Path, records: Path) -> None:
    settings = on_two_ranks(tmp_path / "out", target, records, "deepspeed_zero3", target_source="live")
    settings["engine"]["precision"] = "bf16"
    settings["objective"]["name"] = "jsd"
    launch(command(settings, LAUNCHER))
    assert metrics(tmp_path / "out", "validation")[-1]["alpha"] > 0.5


def _check_shares(folder: Path, engine: str) -> None:
    """What the probe wrote down on each rank."""
    seen = [json.loads((folder / f"probe_{rank}.json").read_text()) for rank in range(RANKS)]
    assert seen[0]["rows"]
    assert len(seen[0]["rows"]) == len(seen[1]["rows"])
    for ours, theirs in zip(seen[0]["rows"], seen[1]["rows"], strict=True):
        assert not set(ours) & set(theirs), "two ranks read the same row in one step"
    weights = seen[0]["num_parameters"]
    state = [one["optimizer_elements"] for one in seen]
    if engine == "ddp":
        assert state == [2 * weights, 2 * weights]
    else:
        assert max(state) < 1.2 * weights, f"{engine} keeps {state} elements for {weights} weights: it did not shard"
        assert sum(state) >= 2 * weights


def _check_same_weights(one: Path, two: Path) -> None:
    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, two))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name] - theirs[name]).abs().max() < 1e-3, name
