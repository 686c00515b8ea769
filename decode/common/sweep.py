"""`--multirun`: one subprocess for each combination of swept values, all checked before the first one starts."""

import hashlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, Override

from decode.common.compose import compose, parse_overrides, split_arguments
from decode.common.progress import get_logger
from decode.common.run_folder import check_same_run, is_finished
from decode.common.typed_config import build, require

_ROOT = Path(__file__).resolve().parents[2]
_MAX_NAME = 120


@dataclass(frozen=True)
class Job:
    """One combination of swept values."""

    name: str
    arguments: list[str]
    config: Any  # the stage's dataclass

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir) / self.name


def run_sweep(stage: str, config_class: type, arguments: Sequence[str]) -> int:
    """Run every combination in its own subprocess and folder; 0 if all are done, 1 if any failed (named at the end).

    A job's folder is <output_dir>/<swept keys and values>. Finished ones are skipped; one that finished with another
    configuration is a ConfigError, as is any combination that is not a valid configuration.
    """
    require(os.environ.get("WORLD_SIZE", "1") == "1", "--multirun starts its own processes, so it takes no launcher.")
    jobs = plan_sweep(stage, config_class, arguments)
    log = get_logger("sweep")
    failed = []
    for number, job in enumerate(jobs, 1):
        if is_finished(job.folder) and not job.config.plan:
            log.info("sweep %d/%d: %s is already finished", number, len(jobs), job.name)
            continue
        log.info("sweep %d/%d: %s -> %s", number, len(jobs), job.name, job.folder)
        if _execute(stage, job) != 0:
            failed.append(job.name)
    if failed:
        log.error("sweep: %d of %d jobs failed: %s", len(failed), len(jobs), ", ".join(failed))
    return 1 if failed else 0


def plan_sweep(stage: str, config_class: type, arguments: Sequence[str]) -> list[Job]:
    """The jobs of a sweep, each with its checked configuration; ConfigError where one is bad or was run differently."""
    options, overrides = split_arguments(arguments)
    parsed = parse_overrides(stage, config_class, overrides)
    is_swept = [override.is_sweep_override() for override in parsed]
    require(any(is_swept), "--multirun without a swept value; give one as key=a,b or key=range(1,4).")
    jobs = []
    for lines in itertools.product(*map(_values, parsed)):
        name = _name([line for line, swept in zip(lines, is_swept, strict=True) if swept])
        arguments = [*options, *lines]
        container = compose(stage, config_class, arguments)
        require(container is not None, "--multirun cannot be combined with --cfg, --info or --help.")
        jobs.append(Job(name, arguments, build(config_class, container or {})))
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
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _name(lines: list[str]) -> str:
    """A folder name from the swept keys and values, of characters that need no quoting in a shell or in Hydra."""
    text = ",".join(line.lstrip("+") for line in lines)
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", text.replace("=", "-").replace(",", "__"))
    is_readable = len(plain) <= _MAX_NAME and re.fullmatch(r"[A-Za-z0-9._=,-]*", text)
    return plain if is_readable else f"{plain[:_MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _execute(stage: str, job: Job) -> int:
    quoted = str(job.folder).replace("\\", "\\\\").replace("'", "\\'")
    search_path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    # -P and PYTHONPATH: a train.py in the current folder must not stand in for ours.
    command = [sys.executable, "-P", "-m", stage, *job.arguments, f"++output_dir='{quoted}'"]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": search_path}, check=False).returncode
