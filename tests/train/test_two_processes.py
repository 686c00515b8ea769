"""Two commands on one run folder: the first one works on, the second one is sent away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from distill.records.record_folder import RecordFolder
from tests.train.toy import ROOT, command, metrics, tiny_settings

PATIENCE_S = 300.0  # for a start on a busy machine; a second training would never end


def start(arguments: list[str], stderr: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
    """A stage that Ctrl-C ends, also where these tests run in the background of a shell, which ignores it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    script = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    whole = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(whole, cwd=ROOT, env=environment, stderr=stderr, text=True)


def wait_for_a_step(process: subprocess.Popen[str], run: Path) -> None:
    log = run / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.stat().st_size):
        time.sleep(0.02)
    assert process.poll() is None


@pytest.mark.slow
def test_a_training_is_not_joined_by_a_second_process(tmp_path: Path, target: Path, records: Path) -> None:
    run = tmp_path / "out"
    arguments = command(tiny_settings(run, target, records=str(records), steps=100_000, resume="auto"))
    first = start(arguments, subprocess.DEVNULL)  # a pipe that nobody reads would stop it once it is full
    try:
        wait_for_a_step(first, run)
        first.send_signal(signal.SIGSTOP)  # it leaves the machine to the second one, and keeps the folder
        second = start(arguments)
        said = second.communicate(timeout=PATIENCE_S)[1]
        assert second.returncode == 2, said
        assert f"process {first.pid} on " in said
        assert "loading" not in said
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGCONT)
        first.send_signal(signal.SIGINT)
        assert first.wait(PATIENCE_S) == 130
    steps = [line["step"] for line in metrics(run, "train")]
    assert steps == list(range(2, 2 * len(steps) + 1, 2))
    assert not (run / "run.lock").exists()


@pytest.mark.slow
def test_of_two_that_start_at_once_one_writes_the_records(tmp_path: Path, target: Path, corpus: Path) -> None:
    arguments = [sys.executable, "-m", "distill", f"target.path={target}", "data=text", f"data.path={corpus}"]
    arguments += ["data.validation_share=0.2", "prompts.tokens=8", "prompts.count=24", "prompts.validation_count=4"]
    arguments += ["sampling.max_new_tokens=16", "records.shard_size=4", f"output_dir={tmp_path / 'out'}"]
    both = [start(arguments), start(arguments)]
    said = [process.communicate()[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    assert not any("Traceback" in one for one in said), said
    assert len(RecordFolder.open(tmp_path / "out")) == 28
