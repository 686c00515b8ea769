"""`... | head`: where the reader has left, a stage ends without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import MINIMUM, STAGES, main_of
from tests.common.toy import write_toy_stage
from tests.tiny import save_tiny_target

ROOT = Path(__file__).resolve().parents[2]


def pipe_without_reader() -> int:
    """The end to write to of a pipe whose other end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def end_of(monkeypatch: pytest.MonkeyPatch, stage: str, *arguments: str) -> object:
    """Exit code of a stage in this process, whose standard output nobody reads."""
    with os.fdopen(pipe_without_reader(), "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "argv", [f"draftsmith-{stage}", *arguments])
        with pytest.raises(SystemExit) as ended:
            main_of(stage)()
    return ended.value.code


@pytest.mark.parametrize("shown", ["--help", "--cfg job"])
@pytest.mark.parametrize("stage", ["decode", *(pytest.param(name, marks=pytest.mark.slow) for name in STAGES)])
def test_what_hydra_shows_may_be_cut_short(monkeypatch, capfd, stage: str, shown: str) -> None:
    assert end_of(monkeypatch, stage, *MINIMUM[stage], *shown.split()) == 141
    assert capfd.readouterr().err == ""


def test_streamed_text_may_be_cut_short(tmp_path: Path, monkeypatch, capfd) -> None:
    target = save_tiny_target(tmp_path / "target")
    out = tmp_path / "out"
    arguments = [f"target.path={target}", "prompt=def main", "decode.max_new_tokens=8", f"output_dir={out}"]
    assert end_of(monkeypatch, "decode", *arguments) == 141
    assert "roken" not in capfd.readouterr().err
    assert [path.name for path in out.iterdir()] == ["run.json"]  # given back, and not finished


def run_toy(folder: Path, argument: str, stdout: int, stderr: int) -> subprocess.CompletedProcess[bytes]:
    write_toy_stage(folder)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "toystage", argument]
    return subprocess.run(command, cwd=folder, env=environment, check=False, stdout=stdout, stderr=stderr)


def test_the_interpreter_has_nothing_to_add_at_its_end(tmp_path: Path) -> None:
    """What is left in a buffer is written when Python ends, after all code of ours."""
    done = run_toy(tmp_path, "--help", stdout=pipe_without_reader(), stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


def test_messages_that_nobody_reads_end_a_stage_too(tmp_path: Path) -> None:
    assert run_toy(tmp_path, "stepz=1", stdout=subprocess.DEVNULL, stderr=pipe_without_reader()).returncode == 141


def test_another_broken_pipe_is_a_failure(tmp_path: Path) -> None:
    done = run_toy(tmp_path, "outcome=broken_pipe", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert b"failed: the worker is gone" in done.stderr
