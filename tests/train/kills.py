"""Training killed with SIGKILL at random instants and resumed: the driver of a test and of scripts/kill_resume.py."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.train.toy import ROOT, metrics

TIMING = ("tokens_per_s", "eta_s", "data_wait_share")
POLL_S = 0.0005


@dataclass(frozen=True)
class Kill:
    """One instant: a delay after training shows its first sign of life, or the middle of a write."""

    delay_s: float
    in_write: bool
    """Kill while a checkpoint lies half-written in its hidden folder."""


def random_kills(count: int, seed: int, longest_s: float) -> list[Kill]:
    """Instants; every third one inside of a write."""
    generator = random.Random(seed)
    return [Kill(generator.uniform(0, longest_s), number % 3 == 2) for number in range(count)]


def run_with_kills(command: list[str], run: Path, kills: list[Kill]) -> list[str]:
    """Start `command` (which resumes by itself) once per kill, then once to the end; says what each kill hit."""
    hits = [_start_and_kill(command, run, kill) for kill in kills]
    finish(command)
    return hits


def finish(command: list[str]) -> None:
    """Run to the end, raising with the output where that fails."""
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stderr[-4000:]}")


def differences(ours: Path, theirs: Path) -> list[str]:
    """What two runs differ in: exported weights bit for bit, the log line for line, timing aside."""
    found = []
    if (ours / "model" / "model.safetensors").read_bytes() != (theirs / "model" / "model.safetensors").read_bytes():
        found.append("the exported weights differ")
    logs = [[_without_timing(line) for line in metrics(run)] for run in (ours, theirs)]
    if logs[0] != logs[1]:
        found.append(f"the logs differ: {len(logs[0])} lines and {len(logs[1])}")
    return found


def _start_and_kill(command: list[str], run: Path, kill: Kill) -> str:
    before = _signs(run)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a launcher's ranks die with it
    )
    while process.poll() is None and _signs(run) == before:
        time.sleep(POLL_S)
    deadline = time.monotonic() + kill.delay_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    while kill.in_write and process.poll() is None and not _half_written(run):
        time.sleep(POLL_S / 10)
    hit = "finished" if process.poll() is not None else "a write" if _half_written(run) else "a step"
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return hit


def _signs(run: Path) -> object:
    """Changes once a started process trains: it cuts or writes the log."""
    log = run / "metrics.jsonl"
    return (log.stat().st_size, log.stat().st_mtime_ns) if log.exists() else None


def _half_written(run: Path) -> bool:
    return any((run / "checkpoints").glob(".*.tmp"))


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def _without_timing(line: dict) -> dict:
    return {key: value for key, value in line.items() if key not in TIMING}
