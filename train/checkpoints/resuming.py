"""Going on from a checkpoint: which one is meant, and whether this run can."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from decode.common.errors import ConfigError, InputError
from decode.common.run_folder import RUN
from train.checkpoints.run_checkpoints import Checkpoints
from train.checkpoints.state import SAVED, STATE, read_state, write_state
from train.checkpoints.whole_folders import HIDDEN, copy_whole
from train.metric_sums import Sums
from train.metrics_log import METRICS


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `resume=path` means: a checkpoint folder, or the newest one of a run; else InputError."""
    if HIDDEN.fullmatch(path.name):
        raise InputError(
            f"resume={path} was being written, or removed, when its run ended, and may be but a half. Give the run's "
            "folder, for its last whole checkpoint"
        )
    if (path / STATE).is_file():
        return path
    newest = Checkpoints(path / "checkpoints", 1).newest()
    if newest is None:
        raise InputError(f"resume={path} is neither a checkpoint nor a run folder with one in checkpoints/")
    return newest


def check_ranks(checkpoint: Path, processes: int, rows_per_step: int, is_bound: bool) -> None:
    """ConfigError unless so many processes can go on from a checkpoint: a step must have as many rows as before, and
    where DeepSpeed has sharded the state (`is_bound`) there must be as many processes. A process that is new has no
    random generator in the checkpoint, and starts it from the seed."""
    saved = read_state(checkpoint)
    rows = saved.rows_per_step
    if is_bound and saved.world_size != processes:
        raise ConfigError(
            f"{checkpoint} was made by {saved.world_size} processes, and now there are {processes}: the state that "
            "each of them keeps would not fit. Start as many as before"
        )
    if rows != rows_per_step:
        raise ConfigError(
            f"{checkpoint} was made by steps of {rows} rows, and now a step has {rows_per_step} (batch_size x "
            f"gradient_accumulation x {processes} processes), so that some would be read twice or never. Set these for "
            f"{rows}"
        )


def check_whole(checkpoint: Path) -> None:
    """Raise InputError unless all that a run reads of a checkpoint is there: state, kept weights, its part of the
    log."""
    saved = read_state(checkpoint)
    log = checkpoint.parent.parent / METRICS
    best = Checkpoints(checkpoint.parent, 1).best_weights(saved.best_step or 0)
    for file, wanted in ((log, True), (best, saved.best_step is not None)):
        if wanted and not file.is_file():
            raise InputError(f"{file} is missing, and {checkpoint / STATE} names it: {SAVED.why}. {SAVED.remedy}")
    if log.stat().st_size < saved.log_position:
        raise InputError(
            f"{log} has {log.stat().st_size} bytes, and {checkpoint / STATE} was written at byte {saved.log_position}: "
            f"lines are missing. {SAVED.remedy}"
        )


def adopt(checkpoint: Path, run: Path) -> Path:
    """Copy a checkpoint of another run into `run`, with its part of the log, and the weights that it keeps where both
    runs judge alike: by another validation these could win over all that come."""
    saved = read_state(checkpoint)
    target = run / "checkpoints" / checkpoint.name
    Checkpoints(target.parent, 1).sweep()
    state = saved.state
    if not _judge_alike(checkpoint.parent.parent, run):
        state = replace(state, best_step=None, best_score=None, best=Sums(), start=None)
    elif saved.best_step is not None:
        copy_whole(checkpoint.with_name(f"best_{saved.best_step:08d}"), target.parent)
    log = (checkpoint.parent.parent / METRICS).read_bytes()
    (run / METRICS).write_bytes(log[: saved.log_position])
    write = partial(write_state, state=state, world_size=saved.world_size)
    copy_whole(checkpoint, target.parent, write)  # last: with it, all is there
    return target


JUDGED_BY = (
    "records",
    "data",
    "target",
    "target_source",
    "sequence_length",
    "seed",
    "validation_rows",
    "window",
    "objective",
)
"""Settings that decide what is validated on, and how."""


def _judge_alike(one: Path, other: Path) -> bool:
    first, second = (RUN.read(run / "run.json") for run in (one, other))
    same = all(first.config.get(name) == second.config.get(name) for name in JUDGED_BY)
    return same and first.bound_to == second.bound_to
