"""Run folders: nothing is overwritten, an unfinished run is continued, one process at a time holds it; and the table of
a sweep of them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from torch.multiprocessing.spawn import spawn

from decode.common.checked_json import read_json, write_json
from decode.common.errors import ConfigError, InputError
from decode.common.run_folder import MANIFEST, RUN, RunFolder, check_run, free_disk_check, open_run, sha256_file
from decode.common.run_lock import LOCK_FILE, Holder, check_unlocked, run_lock
from decode.common.sweep import plan_sweep
from decode.common.sweep_table import RESUMED, Figures, Row, comparison
from tests.commands import config_class


@dataclass(frozen=True)
class Config:
    output_dir: str = "somewhere"
    resume: str = "never"
    plan: bool = False
    seed: int = 7
    sizes: tuple[int, ...] = (1, 2)
    nested: dict = field(default_factory=lambda: {"lr": 0.1})


def reopened(*arguments: Any, **named: Any) -> RunFolder:
    """The folder as a process finds it, which ends before the next one opens it."""
    with open_run(*arguments, **named) as folder:
        return folder


def test_a_new_run_says_how_it_was_made(tmp_path: Path) -> None:
    folder = reopened(str(tmp_path / "a" / "run"), "train", Config())
    run = read_json(folder.path / "run.json")
    assert run["stage"] == "train"
    assert run["config"]["nested"] == {"lr": 0.1}
    assert run["seed"] == 7
    assert set(run["git"]) == {"revision", "dirty"}
    assert "torch" in run["packages"]
    assert run["hardware"]["cores"] >= 1
    assert not folder.is_finished


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    for resume in ("never", "auto"):  # which would be refused, too
        with pytest.raises(ConfigError, match=r"no run\.json") as error:
            reopened(str(tmp_path), "train", Config(), resume)
        assert "resume=auto" not in str(error.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]


def test_auto_continues_and_then_reports_the_finished_run(tmp_path: Path) -> None:
    reopened(str(tmp_path), "train", Config(), "auto")
    again = reopened(str(tmp_path), "train", Config(resume="auto", output_dir="moved"), "auto")
    assert not again.is_finished
    again.finish({"tokens": 3})
    assert read_json(tmp_path / "manifest.json")["tokens"] == 3
    assert reopened(str(tmp_path), "train", Config(), "auto").is_finished


def test_a_changed_configuration_is_refused_with_both_values(tmp_path: Path) -> None:
    reopened(str(tmp_path), "train", Config())
    with pytest.raises(ConfigError, match=r"nested\.lr: 0\.1 there, 0\.2 now"):
        reopened(str(tmp_path), "train", replace(Config(), nested={"lr": 0.2}), "auto")
    with pytest.raises(ConfigError, match="stage 'train'"):
        reopened(str(tmp_path), "distill", Config(), "auto")


def test_a_start_is_told_to_resume_only_where_that_is_taken(tmp_path: Path) -> None:
    begun = RUN.read(reopened(str(tmp_path), "train", Config()).path / "run.json").started
    with pytest.raises(ConfigError, match=rf"begun {re.escape(begun)} and not finished.*Use resume=auto to go on"):
        reopened(str(tmp_path), "train", Config())
    with pytest.raises(ConfigError, match="seed: 7 there, 8 now") as error:
        reopened(str(tmp_path), "train", replace(Config(), seed=8))
    assert "resume=auto" not in str(error.value)
    reopened(str(tmp_path), "train", Config(), "auto").finish({})
    with pytest.raises(ConfigError, match="a finished run, and nothing is overwritten. Use resume=auto to reuse it"):
        reopened(str(tmp_path), "train", Config())


def test_what_a_killed_start_left_behind_does_not_block(tmp_path: Path) -> None:
    (tmp_path / ".run.json.123.tmp").write_text("{")
    (tmp_path / "run.lock").touch()
    assert reopened(str(tmp_path), "train", Config(), "auto").path == tmp_path


def test_resume_from_a_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither never nor auto"):
        reopened(str(tmp_path / "run"), "train", Config(), str(tmp_path / "missing"))
    checkpoint = tmp_path / "old" / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    folder = reopened(str(tmp_path / "run"), "train", Config(), str(checkpoint))
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        reopened(str(folder.path), "train", Config(), str(checkpoint))
    inside = folder.path / "checkpoints" / "step-1"
    inside.mkdir(parents=True)
    assert not reopened(str(folder.path), "train", Config(), str(inside)).is_finished


def test_a_run_is_looked_at_before_it_is_opened_and_nothing_is_written(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert not check_run(run, "train", Config())
    assert not (tmp_path / "run").exists()
    with open_run(run, "train", Config()) as folder:
        with pytest.raises(ConfigError, match="in use by process"):
            check_run(run, "train", Config(), "auto")
        folder.finish({})
        assert check_run(run, "train", Config(), "auto")  # it is known how that ends
    assert sorted(path.name for path in folder.path.iterdir()) == ["manifest.json", "run.json"]
    with pytest.raises(ConfigError, match="a finished run"):
        check_run(run, "train", Config())


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    folder = reopened(str(tmp_path / "run"), "train", Config(), is_main=False)
    folder.finish({})
    assert not folder.path.exists()


def test_a_place_that_cannot_hold_a_run_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="output_dir"):
            reopened(str(place), "train", Config())


def test_json_is_replaced_whole_and_read_with_clear_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"ü": [1, 2]})
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    assert read_json(path) == {"ü": [1, 2]}
    with pytest.raises(InputError, match=r"missing\.json"):
        read_json(tmp_path / "missing.json")
    path.write_text(json.dumps({"a": 1})[:-1])
    with pytest.raises(InputError, match=r"a\.json is not valid JSON"):
        read_json(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"a\.json"):
        read_json(path)


def test_writers_with_one_process_id_do_not_share_a_temporary_file(tmp_path: Path, monkeypatch) -> None:
    """Two containers on one disk: both are process 1, and one would rename the file that the other still writes."""
    names = []
    monkeypatch.setattr("os.getpid", lambda: 1)
    monkeypatch.setattr("os.fsync", lambda _: names.append(next(tmp_path.glob(".*.tmp")).name))
    for content in (1, 2):
        write_json(tmp_path / "a.json", content)
    assert len(set(names)) == 2


def test_checksum_and_disk_check(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x").startswith("ba7816bf")
    free_disk_check(tmp_path / "new" / "folder", 1)
    with pytest.raises(ConfigError, match="GB free"):
        free_disk_check(tmp_path / "new", 10**18)


ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import os, sys, time
from pathlib import Path
from decode.common.run_lock import run_lock
sys.argv[0] = "/somewhere/train/__main__.py"
with run_lock(Path(sys.argv[1])):
    if "fork" in sys.argv and not os.fork():
        sys.stdout.close()
        time.sleep(60)
    if "unwind" in sys.argv:
        if not os.fork():
            sys.exit()
        assert os.wait()[1] == 0
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `folder` until its standard input ends."""
    command = [sys.executable, "-c", HOLD, str(folder), *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{process.pid}\n"
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.common.run_lock._PATIENCE_S", 0.0)


def refused(folder: Path) -> str:
    """What both faces say of a folder that is held."""
    with pytest.raises(ConfigError) as seen:
        check_unlocked(folder)
    with pytest.raises(ConfigError) as asked, run_lock(folder):
        raise AssertionError("two processes hold one folder")
    assert str(seen.value) == str(asked.value)
    return str(asked.value)


def test_the_command_is_one_that_a_shell_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train/export/__main__.py"), "target.path=it's (v2)"])
    command = Holder.this().command
    assert shlex.split(command) == ["python", "-m", "train.export", "target.path=it's (v2)"]


def test_the_second_process_is_told_of_the_first_and_has_its_turn_after_it(tmp_path: Path) -> None:
    with held(tmp_path, "steps=5", "data.path=my files") as first:
        said = refused(tmp_path)
        assert f"process {first.pid} on {socket.gethostname()}, since 20" in said
        assert f"python -m train {tmp_path} steps=5 'data.path=my files'" in said
        first.communicate("")
        assert not (tmp_path / LOCK_FILE).exists()
        check_unlocked(tmp_path)
        with run_lock(tmp_path):
            assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_a_killed_process_leaves_no_lock_not_even_by_a_process_that_it_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.common.run_lock._PATIENCE_S", 30.0)  # the forked one may not have run yet
    with held(tmp_path, "fork", "long" * 500) as first:
        first.kill()
        first.wait()
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == first.pid
        check_unlocked(tmp_path)
        with run_lock(tmp_path):
            assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_forked_process_that_ends_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    with held(tmp_path, "unwind") as first:
        assert f"process {first.pid} on" in refused(tmp_path)


def test_the_lock_of_another_machine_stays_until_a_person_removes_it(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    holder = {"host": "node17", "pid": 42, "started": "2026-01-02T03:04:05+00:00", "command": "python -m train a=1"}
    (folder / LOCK_FILE).write_text(json.dumps(holder))
    said = refused(folder)
    assert "process 42 on node17, since 2026-01-02T03:04:05+00:00: python -m train a=1" in said
    assert json.loads((folder / LOCK_FILE).read_text()) == holder
    remedy = re.search("rm .*$", said)
    assert remedy is not None
    subprocess.run(remedy[0], shell=True, check=True)
    with run_lock(folder):
        pass


def test_a_lock_that_cannot_be_read_is_no_free_one(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("{")
    assert f"rm {tmp_path / LOCK_FILE}" in refused(tmp_path)
    (tmp_path / LOCK_FILE).write_text("")  # released, or its process died before it wrote its name
    with run_lock(tmp_path):
        pass


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_lock_ends_with_what_it_was_taken_for(tmp_path: Path, error: type[BaseException]) -> None:
    def run() -> None:
        with run_lock(tmp_path):
            assert "in use by process" in refused(tmp_path)
            raise error

    with pytest.raises(error):
        run()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_given_up_while_another_waits_is_not_taken_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting process holds a file that has lost its name: a third one would lock another file of that name."""
    monkeypatch.setattr("decode.common.run_lock._PATIENCE_S", 5.0)
    first = run_lock(tmp_path)
    first.__enter__()
    flock, waits = fcntl.flock, threading.Event()

    def seen(file: int, kind: int) -> None:
        waits.set()
        flock(file, kind)

    monkeypatch.setattr("fcntl.flock", seen)
    ender = threading.Thread(target=lambda: (waits.wait(), first.__exit__(None, None, None)))
    ender.start()
    with run_lock(tmp_path):
        ender.join()
        monkeypatch.setattr("decode.common.run_lock._PATIENCE_S", 0.0)
        assert "in use by process" in refused(tmp_path)


def test_a_folder_that_was_replaced_meanwhile_keeps_its_own_lock(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with run_lock(run):
        run.rename(tmp_path / "old")
        run.mkdir()
        with run_lock(run):
            (tmp_path / "old" / LOCK_FILE).unlink()
        (run / LOCK_FILE).write_text("another's")
    assert (run / LOCK_FILE).read_text() == "another's"


def test_a_file_system_without_locks_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(file: int, kind: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with run_lock(tmp_path):
        assert "no locks on this file system" in capsys.readouterr().err


@dataclass
class Plain:
    seed: int = 0


def rank_of_two(rank: int, folder: str) -> None:
    """Opens the run and leaves what it found in `folder`/said_RANK.json."""
    place = Path(folder)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place / 'meeting'}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        with open_run(str(place / "run"), "train", Plain(), "auto", is_main=rank == 0) as run:
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


TRAINING = Figures({"alpha": "alpha", "tau": "tau", "loss": "loss"}, highest="tau", lowest="loss")


def job(folder: Path, status: str = "finished", seconds: float | None = 12.34, **figures: object) -> Row:
    """A job that swept its folder's name."""
    folder.mkdir()
    head = {"schema": 1, "stage": "train", "finished": "2026-01-01T00:00:00+00:00"}
    timed = {} if seconds is None else {"seconds": seconds}
    MANIFEST.write(folder / "manifest.json", head | timed | figures)
    return Row({"lr": folder.name}, folder, status)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.split("\n\n")[0].splitlines()]


def test_jobs_are_ranked_by_tau_then_by_loss_and_those_without_figures_come_last(tmp_path: Path) -> None:
    rows = [
        job(tmp_path / "a", "skipped", tau=2.0, alpha=0.5, loss=1.0),
        Row({"lr": "b"}, tmp_path / "b", "failed, exit code 1"),
        job(tmp_path / "c", tau=None, loss=0.5),
        job(tmp_path / "d", tau=2.51239, alpha=None, loss=9),
        job(tmp_path / "e", tau=None, loss=0.25, seconds=None),
        job(tmp_path / "f", tau=float("nan"), loss=None),
    ]
    table = cells(comparison(rows, TRAINING))
    assert table[0] == ["lr", "alpha", "tau", "loss", "seconds", "folder", "status"]
    assert table[2:] == [
        ["d", "-", "2.512", "9", "12.3", str(tmp_path / "d"), "finished"],
        ["a", "0.5", "2", "1", "12.3", str(tmp_path / "a"), "skipped"],
        ["e", "-", "-", "0.25", "-", str(tmp_path / "e"), "finished"],
        ["c", "-", "-", "0.5", "12.3", str(tmp_path / "c"), "finished"],
        ["b", "-", "-", "-", "-", str(tmp_path / "b"), "failed, exit code 1"],
        ["f", "-", "nan", "-", "12.3", str(tmp_path / "f"), "finished"],
    ]


def test_without_a_best_the_order_is_that_of_the_jobs_and_columns_are_aligned(tmp_path: Path) -> None:
    rows = [job(tmp_path / "a", counts={"tokens": 1000}), job(tmp_path / "b|", counts={"tokens": 20_000_000})]
    table = comparison(rows, Figures({"tokens": "counts.tokens"}))
    assert [row[:2] for row in cells(table)[2:]] == [["a", "1,000"], ["b\\|", "20,000,000"]]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_a_failed_job_has_no_figures_of_what_was_in_its_way(tmp_path: Path) -> None:
    row = job(tmp_path / "a", "failed, exit code 2", tau=3.0)
    assert cells(comparison([row], TRAINING))[2][:4] == ["a", "-", "-", "-"]


def test_a_resumed_job_says_that_its_time_is_of_the_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "run")
    with open_run(place, "train", Config()):
        pass  # killed
    clock = iter([100.0, 107.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with open_run(place, "train", Config(), "auto") as folder:
        folder.finish({"tau": 2.0})
    ended = MANIFEST.read(tmp_path / "run" / "manifest.json")
    assert (ended.seconds, ended.resumed) == (7.5, True)
    table = comparison([Row({}, tmp_path / "run", "finished")], TRAINING)
    assert "| 7.5+ " in table
    assert table.endswith(RESUMED)


def test_a_run_in_one_go_is_timed_whole(tmp_path: Path) -> None:
    with open_run(str(tmp_path / "run"), "train", Config()) as folder:
        folder.finish({})
    ended = MANIFEST.read(tmp_path / "run" / "manifest.json")
    assert not ended.resumed
    assert ended.seconds is not None
    assert RESUMED not in comparison([Row({}, tmp_path / "run", "finished")], TRAINING)


def test_a_sweep_without_a_folder_is_refused() -> None:
    """Decoding prints to the terminal where no output_dir is set."""
    with pytest.raises(ConfigError, match="set output_dir=FOLDER"):
        plan_sweep("decode", config_class("decode"), ["-m", "target.path=t", "prompt=x", "seed=0,1"])
