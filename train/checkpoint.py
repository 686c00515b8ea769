"""Checkpoints that a kill cannot tear: everything is written into a hidden folder, synced, then renamed."""

from __future__ import annotations

import os
import re
import shutil
from collections import OrderedDict
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pydantic import Field, model_validator

from decode.common.checked_json import Amount, Content, Count, JsonFile, Size, shown
from decode.common.errors import ConfigError, InputError
from decode.common.run_folder import RUN, on_main
from decode.common.sealed import KEPT, SEAL, check_seal, sealed
from train.metric_sums import Sums
from train.metrics_log import METRICS

if TYPE_CHECKING:
    from accelerate import Accelerator

SCHEMA = 1
STATE = "state.json"
BEST_WEIGHTS = "model.safetensors"
"""Of the kept weights, and as accelerate calls those of a checkpoint."""
WRAPPED = "module."
HIDDEN = re.compile(r"\.(step|best)_\d+\..*tmp")
"""What is being written or removed."""


@dataclass
class TrainState:
    """What training knows besides weights, optimizer state and random generators (which accelerate keeps)."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens read, over all ranks."""
    best_step: int | None = None
    """Step whose weights are kept."""
    best_score: float | None = None
    best: Sums = field(default_factory=Sums)
    """Validation of the kept weights."""
    since_log: Sums = field(default_factory=Sums)
    """Metrics of the steps after the last log line."""
    log_position: int = 0
    """Bytes of metrics.jsonl at this step."""
    switched_at: int | None = None
    """Step at which the objective took over from its warm-up."""
    start: Sums | None = None
    """Validation of a pruned draft before the first step."""
    rows_per_step: int | None = None
    """Rows that all processes read in a step; older checkpoints do not say it."""


class SavedSums(Content):
    """`Sums`; older checkpoints lack the last ones."""

    loss: float
    loss_count: Amount
    alpha: Amount
    alpha_count: Amount
    tau: Amount
    tau_count: Amount
    tokens: Amount
    confidence_loss: float = 0.0
    confidence_count: Amount = 0.0
    greedy: Amount = 0.0
    tau_greedy: Amount = 0.0


class SavedState(Content):
    """state.json."""

    version: int = Field(alias="schema")
    world_size: Size
    step: Count
    tokens: Count
    best_step: Count | None
    best_score: float | None
    best: SavedSums
    since_log: SavedSums
    log_position: Count
    switched_at: Count | None = None
    start: SavedSums | None = None
    rows_per_step: Size | None = None

    @model_validator(mode="after")
    def _knows_its_best(self) -> SavedState:
        if (self.best_step is None) != (self.best_score is None) or (self.best_step or 0) > self.step:
            raise ValueError(
                f"best_step={self.best_step} and best_score={self.best_score} do not fit together, or not step="
                f"{self.step}"
            )
        return self

    @property
    def state(self) -> TrainState:
        """What training goes on from."""
        known: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(TrainState)}
        for name in ("best", "since_log", "start"):
            known[name] = known[name] and Sums(**known[name].model_dump())
        return TrainState(**known)


SAVED = JsonFile(
    SavedState,
    "training would go on from another step than its weights are of",
    "Resume from another checkpoint, or start again in another output_dir.",
)


class Checkpoints:
    """The folder `checkpoints/` of a run: `step_N` with all of the state, `best_N` with the kept weights alone."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def newest(self) -> Path | None:
        """The last complete checkpoint."""
        found = self._numbered("step")
        return found[max(found)] if found else None

    def best_weights(self, step: int) -> Path:
        """File of the weights kept at `step`."""
        return self.folder / f"best_{step:08d}" / BEST_WEIGHTS

    def save(self, accelerator: Accelerator, state: TrainState) -> None:
        """Write the checkpoint of `state.step`; every rank calls this."""
        final = self.folder / f"step_{state.step:08d}"
        draft = self._begin(accelerator, final)
        accelerator.save_state(str(draft))
        if accelerator.is_main_process:
            content = {"schema": SCHEMA, "world_size": accelerator.num_processes, **asdict(state)}
            SAVED.write(draft / STATE, sealed(content))
        self._commit(accelerator, draft, final)
        if accelerator.is_main_process:
            self._drop_old()

    def save_best(self, accelerator: Accelerator, step: int, weights: dict[str, Any]) -> None:
        """Keep these weights; older best ones stay while a checkpoint names them."""
        from safetensors.torch import save_file

        final = self.folder / f"best_{step:08d}"
        draft = self._begin(accelerator, final)
        if accelerator.is_main_process:
            save_file(without_aliases(weights), draft / BEST_WEIGHTS)
        self._commit(accelerator, draft, final)

    def restore(self, accelerator: Accelerator, checkpoint: Path) -> TrainState:
        """Load a checkpoint into what the accelerator has prepared; every rank calls this."""
        saved = read_state(checkpoint)
        try:
            accelerator.load_state(str(checkpoint))
        except RuntimeError as error:
            other = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
            if not other:
                raise
            raise ConfigError(
                f"{checkpoint} holds weights of other shapes than this draft ({other[0]}): an earlier version chose "
                "other sizes without draft.width or draft.heads. Finish the run with it, or train anew in another "
                "output_dir"
            ) from error
        accelerator.step = 0  # of micro-steps: it was saved, and may be of another gradient_accumulation
        return saved.state

    def forget_after(self, step: int) -> None:
        """Remove what a run wrote after `step`, and what a killed one left half-written; rank 0 only."""
        later = [path for kind in ("step", "best") for number, path in self._numbered(kind).items() if number > step]
        for path in later:
            _remove(path)
        self.sweep()

    def sweep(self) -> None:
        """Remove what writes and removals that were cut short have left; rank 0 only, between writes."""
        for path in self.folder.glob(".*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _begin(self, accelerator: Accelerator, final: Path) -> Path:
        """An empty folder, the same one on all ranks."""
        draft = on_main(accelerator.is_main_process, lambda: _fresh(final))
        accelerator.wait_for_everyone()
        return draft

    def _commit(self, accelerator: Accelerator, draft: Path, final: Path) -> None:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _give_name(draft, final)
        accelerator.wait_for_everyone()

    def _drop_old(self) -> None:
        """Remove all but the newest checkpoints, and the best weights that none of these names."""
        self.sweep()
        steps = self._numbered("step")
        for number in sorted(steps)[: -self.keep]:
            _remove(steps.pop(number))
        needed = {read_state(path).best_step for path in steps.values()}
        for number, path in self._numbered("best").items():
            if number not in needed:
                _remove(path)

    def _numbered(self, kind: str) -> dict[int, Path]:
        found = {path: re.fullmatch(rf"{kind}_(\d+)", path.name) for path in self.folder.glob(f"{kind}_*")}
        return {int(match[1]): path for path, match in found.items() if match}


def save_unwrapped(accelerator: Accelerator) -> None:
    """Have checkpoints name weights as the draft does. DDP puts `module.` before the names, and a single process on a
    GPU is not wrapped, so that neither could load what the other one saved."""

    def save(_models: Any, weights: list[dict[str, Any]], _folder: str) -> None:
        pairs = [[(name.removeprefix(WRAPPED), one) for name, one in each.items()] for each in weights]
        weights[:] = map(OrderedDict, pairs)  # of any other mapping accelerate does not leave out what is tied

    def load(models: list[Any], folder: str) -> None:
        from safetensors import safe_open

        with safe_open(str(Path(folder, BEST_WEIGHTS)), "pt") as saved:
            is_wrapped = all(name.startswith(WRAPPED) for name in saved.keys())  # noqa: SIM118 - by earlier versions
        if not is_wrapped:
            models[:] = [accelerator.unwrap_model(one) for one in models]

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


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


def saved_optimizer(checkpoint: Path) -> str:
    """What trained it: Muon leaves the matrices' state beside that of AdamW, or alone where there are matrices only, as
    of adapters; DeepSpeed, which has none, takes AdamW."""
    if (checkpoint / "optimizer_1.bin").is_file():
        return "muon"
    import torch  # a bad configuration is refused without it

    alone = checkpoint / "optimizer.bin"
    if not alone.is_file():
        return "adamw"
    state = torch.load(alone, map_location="cpu", weights_only=True, mmap=True)["state"]
    return "muon" if state and not any("exp_avg" in one for one in state.values()) else "adamw"


def read_state(checkpoint: Path) -> SavedState:
    """state.json; InputError where it is damaged, of another version, or another checkpoint's."""
    content = KEPT.read(checkpoint / STATE)
    if content.get("schema") != SCHEMA:
        raise InputError(
            f"{checkpoint} has schema {shown(content.get('schema'))}, and this version reads {SCHEMA}; resume it with "
            "the older version"
        )
    if SEAL in content:  # the first version wrote none
        check_seal(content, checkpoint / STATE, SAVED)
    saved = SAVED.read(checkpoint / STATE)
    named = re.fullmatch(r"step_(\d+)", checkpoint.name)
    if named and int(named[1]) != saved.step:
        raise InputError(
            f"{checkpoint / STATE}: step is {saved.step}, in {checkpoint.name}: {SAVED.why}. {SAVED.remedy}"
        )
    return saved


def check_ranks(checkpoint: Path, processes: int, rows_per_step: int, is_bound: bool) -> None:
    """ConfigError unless so many processes can go on from a checkpoint: a step must have as many rows as before, and
    where DeepSpeed has sharded the state (`is_bound`) there must be as many processes. A process that is new has no
    random generator in the checkpoint, and starts it from the seed."""
    saved = read_state(checkpoint)
    rows = saved.rows_per_step
    if rows is None:
        config = RUN.read(checkpoint.parents[1] / "run.json").config
        is_bound, rows = True, config["batch_size"] * config["gradient_accumulation"] * saved.world_size
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
    """Copy a checkpoint of another run into `run`, with the weights it keeps and its part of the log."""
    saved = read_state(checkpoint)
    target = run / "checkpoints" / checkpoint.name
    Checkpoints(target.parent, 1).sweep()
    if saved.best_step is not None:
        _copy(checkpoint.with_name(f"best_{saved.best_step:08d}"), target.parent)
    log = (checkpoint.parent.parent / METRICS).read_bytes()
    (run / METRICS).write_bytes(log[: saved.log_position])
    _copy(checkpoint, target.parent)  # last: with it, all is there
    return target


def without_aliases(weights: dict[str, Any]) -> dict[str, Any]:
    """The state dict with each storage once (tied weights have several names), contiguous, on the CPU."""
    seen: set[tuple[int, Any]] = set()
    kept = {}
    for name, tensor in weights.items():
        storage = (tensor.data_ptr(), tensor.shape)
        if storage not in seen:
            seen.add(storage)
            kept[name] = tensor.detach().cpu().contiguous()
    return kept


def _hidden(path: Path) -> Path:
    """A name beside it that was never used: a rank of a killed run may still write into the folder that it knows."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}.tmp")


def _fresh(final: Path) -> Path:
    """An empty hidden folder for what is to be called `final`; InputError where something is called so already."""
    if final.exists():
        raise InputError(
            f"{final} is there already, and this run has not written it: checkpoints are never written over. Is "
            "another process at work in this folder? Move it away, and go on with resume=auto"
        )
    draft = _hidden(final)
    draft.mkdir(parents=True)
    return draft


def _give_name(draft: Path, final: Path) -> None:
    """Once all of it is on disk."""
    for path in (*draft.rglob("*"), draft):
        _sync(path)
    draft.rename(final)
    _sync(final.parent)


def _copy(folder: Path, to: Path) -> None:
    """A whole folder of another run, in place of one that a version before this left as a half."""
    final, draft = to / folder.name, _hidden(to / folder.name)
    shutil.copytree(folder, draft)
    if final.exists():
        _remove(final)
    _give_name(draft, final)


def _remove(path: Path) -> None:
    """Out of sight first, so that a kill in between leaves no half of a folder that looks whole."""
    hidden = _hidden(path)
    path.rename(hidden)
    shutil.rmtree(hidden)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
