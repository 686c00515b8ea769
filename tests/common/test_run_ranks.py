"""A run folder under two ranks: rank 0 holds it, both work in it, and a refusal ends both."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed
from torch.multiprocessing.spawn import spawn

from decode.common.checked_json import write_json
from decode.common.errors import ConfigError
from decode.common.run_folder import open_run
from decode.common.run_lock import LOCK_FILE, run_lock


@dataclass
class Config:
    seed: int = 0


def rank_of_two(rank: int, folder: str) -> None:
    """Opens the run and leaves what it found in `folder`/said_RANK.json."""
    place = Path(folder)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place / 'meeting'}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        with open_run(str(place / "run"), "train", Config(), "auto", is_main=rank == 0) as run:
            said = sorted(path.name for path in run.path.iterdir())
            distributed.barrier()
    except ConfigError as error:
        said = str(error)
    write_json(place / f"said_{rank}.json", said)
    distributed.destroy_process_group()


def start(folder: Path) -> list:
    (folder / "meeting").unlink(missing_ok=True)
    spawn(rank_of_two, args=(str(folder),), nprocs=2)
    return [json.loads((folder / f"said_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_two_ranks_are_one_run(tmp_path: Path) -> None:
    assert start(tmp_path) == [["run.json", LOCK_FILE]] * 2  # rank 1 comes in when rank 0 has started the run
    assert not (tmp_path / "run" / LOCK_FILE).exists()
    with run_lock(tmp_path / "run"):
        said = start(tmp_path)
    assert "in use by process" in said[0]
    assert said[1] == said[0]
