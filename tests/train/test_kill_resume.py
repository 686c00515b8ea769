"""A run that was killed again and again ends with the bits of one that was not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.kills import Kill, differences, finish, random_kills, run_with_kills
from tests.train.toy import command, save_target, tiny_settings

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")


IN_A_WRITE = [Kill(0.0, in_write=True)]


@pytest.mark.parametrize(
    ("engine", "kills", "pruning"),
    [
        ("single", IN_A_WRITE, {}),
        pytest.param("single", random_kills(10, 0, longest_s=0.5), {}, marks=pytest.mark.slow),
        pytest.param("single", random_kills(4, 0, longest_s=0.5), {"sparsity": 0.5}, marks=pytest.mark.slow),
        pytest.param("ddp", random_kills(4, 0, longest_s=0.5), {}, marks=[pytest.mark.engines, pytest.mark.slow]),
    ],
    ids=["once", "often", "sparse", "ddp"],
)
def test_killed_and_resumed_equals_uninterrupted(
    tmp_path: Path, target: Path, records: Path, engine: str, kills: list[Kill], pruning: dict[str, Any]
) -> None:
    launcher = (sys.executable,) if engine == "single" else TORCHRUN
    settings = tiny_settings(
        tmp_path / "whole",
        target,
        records=str(records),
        engine={"name": engine},
        draft={"init_from": str(save_target(tmp_path / "other", seed=1)), "pruning": pruning} if pruning else {},
        steps=150 if len(kills) > 1 else 24,
        checkpoint_every=4,
        validate_every=6,
        log_every=5,
    )
    finish(command(settings, launcher))
    settings |= {"output_dir": str(tmp_path / "killed"), "resume": "auto"}
    hits = run_with_kills(command(settings, launcher), tmp_path / "killed", kills)
    assert "a write" in hits
    assert differences(tmp_path / "whole", tmp_path / "killed") == []
