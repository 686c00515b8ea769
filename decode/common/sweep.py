"""`--multirun`: one subprocess for each combination of swept values, all checked before the first one starts, and one
table of them at the end."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, Override

from decode.common.checked_json import write_atomically
from decode.common.compose import compose, parse_overrides, split_arguments
from decode.common.markdown import fenced
from decode.common.plain_text import as_argument, unquoted, written
from decode.common.progress import get_logger
from decode.common.run_folder import check_same_run, is_finished
from decode.common.sweep_table import Figures, Row, comparison
from decode.common.typed_config import build, require

_ROOT = Path(__file__).resolve().parents[2]
_MAX_NAME = 120
log = get_logger("sweep")


@dataclass(frozen=True)
class Job:
    """One combination of swept values."""

    name: str
    swept: dict[str, str]
    """Key -> value, of those that other jobs have otherwise."""
    arguments: list[str]
    config: Any  # the stage's dataclass

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir) / self.name


def run_sweep(stage: str, config_class: type, arguments: Sequence[str], figures: Figures) -> int:
    """Run every combination in its own subprocess and folder, and compare them; 0 if all are done, 1 if any failed.

    A job's folder is <output_dir>/<swept keys and values>. Finished ones are skipped; one that finished with another
    configuration is a ConfigError, as is any combination that is not a valid configuration.
    """
    require(os.environ.get("WORLD_SIZE", "1") == "1", "--multirun starts its own processes, so it takes no launcher.")
    jobs = plan_sweep(stage, config_class, arguments)
    rows = []
    for number, job in enumerate(jobs, 1):
        where = f"sweep {number}/{len(jobs)}: {job.name}"
        if is_finished(job.folder) and not job.config.plan:
            log.info("%s is already finished", where)
            status = "skipped"
        else:
            log.info("%s -> %s", where, job.folder)
            status = _status(_execute(stage, job))
        rows.append(Row(job.swept, job.folder, status))
    failed = [job.name for job, row in zip(jobs, rows, strict=True) if row.failed]
    if not any(job.config.plan for job in jobs):
        _show(comparison(rows, figures), _common_folder(jobs) / "sweep.md", stage, arguments)
    if failed:
        log.error("sweep: %d of %d jobs failed: %s", len(failed), len(jobs), ", ".join(failed))
    return 1 if failed else 0


def _status(code: int) -> str:
    """For the table; a process that a signal ended has the code that a shell would see."""
    return "finished" if code == 0 else f"failed, exit code {code if code > 0 else 128 - code}"


def _show(table: str, file: Path, stage: str, arguments: Sequence[str]) -> None:
    """Print the table, and keep it in `file` in place of that of an earlier run of the sweep."""
    sys.stdout.write(f"\n{table}\n")
    command = fenced("bash", [f"python -m {stage} {shlex.join(arguments)}"])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, f"# Sweep\n\n{command}\n\n{table}\n".encode())
        log.info("sweep: the table is kept in %s", file)
    except OSError as error:  # all that it says still lies in the jobs' folders
        log.error("sweep: the table could not be kept in %s: %s", file, error)


def _common_folder(jobs: Sequence[Job]) -> Path:
    """output_dir, or what several of them have in common."""
    return Path(os.path.relpath(os.path.commonpath([Path(job.config.output_dir).absolute() for job in jobs])))


def plan_sweep(stage: str, config_class: type, arguments: Sequence[str]) -> list[Job]:
    """The jobs of a sweep, each with its checked configuration; ConfigError where one is bad or was run differently."""
    options, overrides = split_arguments(arguments)
    parsed = parse_overrides(stage, config_class, overrides, sweeps=True)
    is_swept = [override.is_sweep_override() for override in parsed]
    require(any(is_swept), "--multirun without a swept value; give one as key=a,b or key=range(1,4).")
    jobs = []
    for lines in itertools.product(*map(_values, parsed)):
        swept = [line for line, chosen in zip(lines, is_swept, strict=True) if chosen]
        arguments = [*options, *lines]
        container = compose(stage, config_class, arguments)
        require(container is not None, "--multirun cannot be combined with --cfg, --info or --hydra-help.")
        config = build(config_class, container or {})
        require(
            config.output_dir is not None, "--multirun keeps a folder for each job; set output_dir=FOLDER for them."
        )
        values = {key.lstrip("+"): unquoted(value) for key, value in (line.split("=", 1) for line in swept)}
        jobs.append(Job(_name(swept), values, arguments, config))
    folders = [str(job.folder) for job in jobs]
    twice = sorted({folder for folder in folders if folders.count(folder) > 1})
    require(
        not twice, f"--multirun names a combination twice, for one folder: {', '.join(twice)}. Name each value once."
    )
    for job in jobs:
        if is_finished(job.folder):
            check_same_run(job.folder, stage, job.config)
    return jobs


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.input_line or ""]
    is_listed = override.is_discrete_sweep() and not isinstance(override.value(), Glob)
    require(is_listed, f"{override.input_line}: a glob or a continuous range names no values; give those to try.")
    key = override.get_key_element()
    return [f"{key}={written(value)}" for value in override.sweep_iterator()]


def _name(lines: list[str]) -> str:
    """A folder name from the swept keys and values, of characters that need no quoting in a shell or in Hydra."""
    text = ",".join(line.lstrip("+") for line in lines)
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", text.replace("=", "-").replace(",", "__"))
    is_readable = len(plain) <= _MAX_NAME and re.fullmatch(r"[A-Za-z0-9._=,-]*", text)
    return plain if is_readable else f"{plain[:_MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _execute(stage: str, job: Job) -> int:
    search_path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    # -P and PYTHONPATH: a train.py in the current folder must not stand in for ours.
    command = [sys.executable, "-P", "-m", stage, *job.arguments, as_argument("++output_dir", str(job.folder))]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": search_path}, check=False).returncode
