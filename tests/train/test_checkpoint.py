"""What lies in checkpoints/ at any instant can be resumed from, and the log agrees with it."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.optim import AdamW

from decode.common.errors import ConfigError, InputError
from decode.common.run_folder import RUN
from train.checkpoints.resuming import adopt, check_ranks, find_checkpoint
from train.checkpoints.run_checkpoints import Checkpoints, without_aliases
from train.checkpoints.state import TrainState, read_state
from train.checkpoints.whole_folders import HIDDEN
from train.metric_sums import Sums
from train.metrics_log import MetricsLog


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

    def load_state(self, folder: str) -> None:
        """There is nothing to load into."""


def save(checkpoints: Checkpoints, step: int, best: int, fails: bool = False) -> None:
    state = TrainState(step=step, best_step=best, best_score=0.5, since_log=Sums(loss=0.1 + 0.2))
    checkpoints.save(OneProcess(fails), state)  # type: ignore[arg-type]


def save_best(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save_best(OneProcess(), step, {"w": torch.full((1,), float(step))})  # type: ignore[arg-type]


def test_a_write_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 10, 10)
    with pytest.raises(OSError, match="no space"):
        save(checkpoints, 20, 20, fails=True)
    assert checkpoints.newest() == tmp_path / "step_00000010"
    checkpoints.forget_after(10)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000010"]


def test_what_a_write_that_failed_left_behind_is_not_taken_along(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(OSError, match="no space"):
        save(checkpoints, 20, 20, fails=True)
    (draft,) = tmp_path.iterdir()
    (draft / "old").touch()
    save(checkpoints, 20, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000020"]
    assert {path.name for path in (tmp_path / "step_00000020").iterdir()} == {"model.safetensors", "state.json"}


def test_ranks_wait_for_the_folder_for_each_others_files_and_for_the_name(tmp_path: Path) -> None:
    """Who writes before there is a folder fails, and what is written after it was renamed is lost."""

    class Waiting(OneProcess):
        def wait_for_everyone(self) -> None:
            seen.append({str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()})
            assert any(tmp_path.iterdir())

    seen: list[set[str]] = []
    Checkpoints(tmp_path, keep=1).save(Waiting(), STATE)  # type: ignore[arg-type]
    files = ("model.safetensors", "state.json")
    assert seen[0] == set()
    (draft,) = {Path(file).parent.name for file in seen[1]}
    assert HIDDEN.fullmatch(draft)
    assert seen[1:] == [{f"{folder}/{file}" for file in files} for folder in (draft, "step_00000007")]


def test_old_checkpoints_go_but_never_weights_that_a_kept_one_names(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3)):
        if step == best:
            save_best(checkpoints, step)
        save(checkpoints, step, best)
        kept = sorted(path.name for path in tmp_path.iterdir())
        if step == 3:
            assert kept == ["best_00000001", "best_00000003", "step_00000002", "step_00000003"]
    assert kept == ["best_00000003", "step_00000003", "step_00000004"]


STATE = TrainState(
    step=7,
    tokens=123,
    best_step=5,
    best_score=0.1 + 0.2,
    best=Sums(1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
    since_log=Sums(loss=0.1 + 0.7, loss_count=3.0),
    log_position=99,
    start=Sums(loss=2.0, loss_count=0.1 + 0.2),
)


def test_a_run_begins_with_nothing() -> None:
    assert asdict(TrainState()) == {
        "step": 0,
        "tokens": 0,
        "best_step": None,
        "best_score": None,
        "best": asdict(Sums()),
        "since_log": asdict(Sums()),
        "log_position": 0,
        "switched_at": None,
        "start": None,
        "rows_per_step": 0,
    }


def test_a_removal_that_was_cut_short_is_no_hindrance(tmp_path: Path) -> None:
    """It leaves half of a folder under a hidden name."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1, 1)
    (tmp_path / ".step_00000001.tmp").mkdir()
    (tmp_path / ".step_00000001.tmp" / "half").touch()
    save(checkpoints, 2, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_folders_of_other_names_are_left_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    (tmp_path / "step_of_mine").mkdir()
    save(checkpoints, 1, 1)
    save(checkpoints, 2, 2)
    assert checkpoints.newest() == tmp_path / "step_00000002"
    assert {path.name for path in tmp_path.iterdir()} == {"step_of_mine", "step_00000002"}


def test_state_survives_to_the_last_bit(tmp_path: Path) -> None:
    """All of it: a best score that is forgotten lets worse weights replace the kept ones."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(OneProcess(), STATE)  # type: ignore[arg-type]
    assert checkpoints.restore(OneProcess(), tmp_path / "step_00000007") == STATE  # type: ignore[arg-type]


def test_weights_moments_and_random_numbers_come_back(tmp_path: Path) -> None:
    """What a step draws and makes of the weights, after a checkpoint and after its restoration, are the same."""
    model = nn.Linear(2, 2)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=0.1))

    def step() -> list[float]:
        drawn = [torch.rand(2), torch.from_numpy(np.random.rand(2)), torch.tensor([random.random()])]  # noqa: NPY002
        accelerator.backward(model(drawn[0]).sum())
        optimizer.step()
        optimizer.zero_grad()
        return torch.cat([*drawn, *(weight.detach().flatten() for weight in model.parameters())]).tolist()

    step()
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(accelerator, STATE)
    first, second = step(), step()
    checkpoints.restore(accelerator, tmp_path / "step_00000007")
    assert [step(), step()] == [first, second]


def test_another_number_of_processes_goes_on_with_as_many_rows(tmp_path: Path) -> None:
    where = tmp_path / "step_00000007"
    Checkpoints(tmp_path, keep=1).save(OneProcess(), replace(STATE, rows_per_step=8))  # type: ignore[arg-type]
    check_ranks(where, 2, 8, is_bound=False)
    with pytest.raises(ConfigError, match="was made by 1 processes, and now there are 2"):
        check_ranks(where, 2, 8, is_bound=True)
    with pytest.raises(ConfigError, match="by steps of 8 rows, and now a step has 16"):
        check_ranks(where, 2, 16, is_bound=False)


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path, keep=1).save(OneProcess(), STATE)  # type: ignore[arg-type]
    file = tmp_path / "step_00000007" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 99}))
    with pytest.raises(InputError, match="has schema 99, and this version reads 1"):
        read_state(tmp_path / "step_00000007")


def test_what_was_written_after_a_step_is_forgotten(tmp_path: Path) -> None:
    """Also best weights: the resumed run writes its own under the same name."""
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in (1, 2, 3):
        save_best(checkpoints, step)
        save(checkpoints, step, step)
    (tmp_path / ".step_00000004.tmp").mkdir()
    checkpoints.forget_after(2)
    kept = {f"{kind}_0000000{step}" for kind in ("best", "step") for step in (1, 2)}
    assert {path.name for path in tmp_path.iterdir()} == kept
    save_best(checkpoints, 3)


@pytest.mark.parametrize("judged", ["alike", "by another window", "on other texts"])
def test_a_checkpoint_is_adopted_with_its_part_of_the_log_and_what_its_run_kept_if_both_judge_alike(
    tmp_path: Path, judged: str
) -> None:
    """Also by a run that was killed while it did so."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for cut_short in ("best_00000001", ".step_00000002.tmp"):
        (ours / "checkpoints" / cut_short).mkdir(parents=True)
    for run in (theirs, ours):
        run.mkdir(exist_ok=True)
        of_text = "b" if run == ours and judged == "on other texts" else "a"
        config = {"window": 2 if run == ours and judged == "by another window" else 7, "steps": len(str(run))}
        note: dict[str, Any] = {"schema": 1, "stage": "train", "started": "", "config": config}
        RUN.write(run / "run.json", note | {"started": "now", "bound_to": {"data_hash": of_text}})
    checkpoints = Checkpoints(theirs / "checkpoints", keep=9)
    save_best(checkpoints, 1)
    save_best(checkpoints, 2)
    seen = Sums(tau=3.0, tau_count=2.0)
    done = TrainState(2, 9, since_log=seen, log_position=7, switched_at=1, rows_per_step=4)
    state = replace(done, best_step=1, best_score=0.5, best=seen, start=seen)
    checkpoints.save(OneProcess(), state)  # type: ignore[arg-type]
    (theirs / "metrics.jsonl").write_text("line 1\nline 2\n")
    adopted = adopt(theirs / "checkpoints" / "step_00000002", ours)
    assert adopted == ours / "checkpoints" / "step_00000002"
    names = {path.name for path in (ours / "checkpoints").iterdir()}
    assert names == {"step_00000002", "best_00000001"}
    assert read_state(adopted).state == (state if judged == "alike" else done)
    kept = ours / "checkpoints" / "best_00000001"
    assert [path.name for path in kept.iterdir()] == (["model.safetensors"] if judged == "alike" else [])
    assert read_state(theirs / "checkpoints" / "step_00000002").state == state
    assert (ours / "metrics.jsonl").read_text() == "line 1\n"
    assert checkpoints.newest() == theirs / "checkpoints" / "step_00000002"


def test_a_checkpoint_gets_its_name_once_all_of_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file before the folder is renamed, and the name itself after."""
    done: list[str] = []
    names: dict[int, str] = {}
    opened, rename = os.open, Path.rename

    def watch(path: Any, flags: int) -> int:
        handle = opened(path, flags)
        names[handle] = Path(path).name
        return handle

    def renamed(path: Path, to: Path) -> Path:
        done.append(f"{path.name} -> {Path(to).name}")
        return rename(path, to)

    monkeypatch.setattr("train.checkpoints.whole_folders.os.open", watch)
    monkeypatch.setattr("train.checkpoints.whole_folders.os.fsync", lambda handle: done.append(names.get(handle, "")))
    monkeypatch.setattr(Path, "rename", renamed)
    folder = tmp_path / "checkpoints"
    save(Checkpoints(folder, keep=1), 1, 1)
    (last,) = [place for place, what in enumerate(done) if what.endswith(".tmp -> step_00000001")]
    assert {"model.safetensors", "state.json", done[last].split(" ")[0]} <= set(done[:last])
    assert done[last + 1 :] == ["checkpoints"]


def test_a_kill_in_the_middle_of_a_write_leaves_a_half_that_nobody_takes(tmp_path: Path) -> None:
    """And what the killed one still writes does not get into the next attempt."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    save(checkpoints, 10, 10)

    class Killed(OneProcess):
        def save_state(self, folder: str) -> None:
            super().save_state(folder)
            Path(folder, "state.json").write_text((tmp_path / "checkpoints/step_00000010/state.json").read_text())
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        checkpoints.save(Killed(), TrainState(step=20))  # type: ignore[arg-type]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (half,) = (tmp_path / "checkpoints").glob(".step_00000020.*.tmp")
    assert find_checkpoint(tmp_path).name == "step_00000010"
    with pytest.raises(InputError, match=r"\.tmp was being written, or removed, when its run ended"):
        find_checkpoint(half)

    class Late(OneProcess):
        def save_state(self, folder: str) -> None:
            super().save_state(folder)
            (half / "random_states_1.pkl").write_bytes(b"a rank of the killed run")

    checkpoints.save(Late(), TrainState(step=20))  # type: ignore[arg-type]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_00000010", "step_00000020"}
    assert {path.name for path in checkpoints.newest().iterdir()} == {"model.safetensors", "state.json"}  # type: ignore


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 10, 10)
    with pytest.raises(InputError, match="step_00000010 is there already, and this run has not written it"):
        save(checkpoints, 10, 11)
    assert read_state(tmp_path / "step_00000010").best_step == 10
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000010"]


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
    kept = without_aliases({"embedding": table, "head": table.detach(), "other": torch.ones(3, 2), "view": table[:2]})
    assert list(kept) == ["embedding", "other", "view"]


def test_weights_are_kept_as_they_are(tmp_path: Path) -> None:
    """A transposed view in its own order, whole numbers as whole numbers, and free of the graph they came from."""
    table = torch.arange(6.0).view(3, 2).requires_grad_()
    Checkpoints(tmp_path, 1).save_best(OneProcess(), 3, {"turned": table.T, "ids": torch.arange(2)})  # type: ignore
    kept = load_file(Checkpoints(tmp_path, 1).best_weights(3))
    assert kept["turned"].tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    assert kept["ids"].dtype == torch.int64


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
