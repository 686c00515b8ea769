"""The lock of a run folder: one process at a time, and none that a dead one could keep."""

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from decode.common.errors import ConfigError
from decode.common.run_lock import LOCK_FILE, Holder, check_unlocked, run_lock

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
