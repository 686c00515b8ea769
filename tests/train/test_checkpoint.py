"""What lies in checkpoints/ at any instant can be resumed from, and the log agrees with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decode.house.errors import InputError
from train.checkpoint import Checkpoints, TrainState, find_checkpoint, read_state, without_aliases
from train.log import MetricsLog
from train.sums import Sums


class OneProcess:
    """What Checkpoints needs of an accelerator."""

    is_main_process = True
    num_processes = 1

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def wait_for_everyone(self) -> None:
        """One process waits for nobody."""

    def save_state(self, folder: str) -> None:
        Path(folder, "model.safetensors").write_bytes(b"weights")
        if self.fails:
            raise OSError("no space left on device")


def save(checkpoints: Checkpoints, step: int, best: int, fails: bool = False) -> None:
    state = TrainState(step=step, best_step=best, since_log=Sums(loss=0.1 + 0.2))
    checkpoints.save(OneProcess(fails), state)  # type: ignore[arg-type]


def test_a_write_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 10, 10)
    with pytest.raises(OSError, match="no space"):
        save(checkpoints, 20, 20, fails=True)
    assert checkpoints.newest() == tmp_path / "step_00000010"
    checkpoints.forget_after(10)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000010"]


def test_old_checkpoints_go_but_never_weights_that_a_kept_one_names(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3)):
        if step == best:
            checkpoints.save_best(OneProcess(), step, {"w": torch.ones(1)})  # type: ignore[arg-type]
        save(checkpoints, step, best)
        kept = sorted(path.name for path in tmp_path.iterdir())
        if step == 3:
            assert kept == ["best_00000001", "best_00000003", "step_00000002", "step_00000003"]
    assert kept == ["best_00000003", "step_00000003", "step_00000004"]


def test_state_survives_to_the_last_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 7, 7)
    content = read_state(tmp_path / "step_00000007")
    del content["world_size"]
    assert TrainState.from_dict(content).since_log.loss == 0.1 + 0.2


def test_a_path_means_a_checkpoint_or_the_newest_of_a_run(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    save(checkpoints, 1, 1)
    save(checkpoints, 2, 1)
    assert find_checkpoint(tmp_path).name == "step_00000002"
    assert find_checkpoint(tmp_path / "checkpoints" / "step_00000001").name == "step_00000001"
    with pytest.raises(InputError, match="neither a checkpoint nor a run folder"):
        find_checkpoint(tmp_path / "checkpoints")


def test_tied_weights_are_stored_once() -> None:
    table = torch.ones(3, 2)
    kept = without_aliases({"embedding": table, "head": table, "other": torch.ones(3, 2), "view": table[:2]})
    assert list(kept) == ["embedding", "other", "view"]


def test_the_log_is_cut_back_to_its_checkpoint(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1})
    position = log.position
    log.write({"step": 2})
    log.close()
    again = MetricsLog(tmp_path / "metrics.jsonl", position)
    again.write({"step": 2, "again": True})
    again.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2, "again": true}\n'
    with pytest.raises(InputError, match="lines are missing"):
        MetricsLog(tmp_path / "metrics.jsonl", position=10_000)
