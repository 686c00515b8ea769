"""Ranks wait for the slowest one: the process group is told so, whatever its backend's own patience is."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.multiprocessing.spawn import spawn

from decode.common.run_folder import SLOWEST_RANK
from tests.train.toy import tiny_config
from train.engine import _free_port, build_accelerator

PATIENCE = timedelta(seconds=1)


@pytest.mark.parametrize("is_cuda", [True, False])
def test_every_process_group_is_told_to_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_cuda: bool) -> None:
    """On a GPU accelerate makes it, on a CPU we do."""
    told: dict[str, Any] = {}

    def accelerator(**settings: Any) -> Any:
        told["accelerator"] = [one.to_kwargs()["timeout"] for one in settings["kwargs_handlers"]]
        return SimpleNamespace(distributed_type=SimpleNamespace(value="NO"))

    monkeypatch.setattr("torch.cuda.is_available", lambda: is_cuda)
    monkeypatch.setattr("accelerate.Accelerator", accelerator)
    monkeypatch.setattr("accelerate.state.PartialState", lambda cpu, timeout: told.update(ours=timeout))
    monkeypatch.setattr("train.engine._make_deterministic", lambda: None)
    build_accelerator(tiny_config(tmp_path, Path("target"), records="there", engine={"device": "auto"}))
    assert told == {"accelerator": [SLOWEST_RANK]} | ({} if is_cuda else {"ours": SLOWEST_RANK})
    assert timedelta(days=1) < SLOWEST_RANK


def late(rank: int, port: int, folder: str) -> None:
    """Rank 0 comes to the meeting when the patience of gloo is at its end, and so does it a second time."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed_c10d.default_pg_timeout = PATIENCE
    assert distributed_c10d._get_default_timeout("gloo") == PATIENCE  # type: ignore[arg-type]
    settings: dict[str, Any] = {"records": "there", "engine": {"name": "ddp"}}
    accelerator = build_accelerator(tiny_config(Path(folder), Path("target"), **settings))
    if rank == 0:
        time.sleep(3 * PATIENCE.total_seconds())
    accelerator.wait_for_everyone()
    Path(folder, f"rank_{rank}").write_text(str(accelerator.reduce(torch.ones(1)).item()))  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    spawn(late, (_free_port(), str(tmp_path)), nprocs=2)
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]
