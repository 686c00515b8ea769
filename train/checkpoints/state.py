"""What training knows of itself at a step, in a checkpoint's state.json."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from decode.common.checked_json import Amount, Content, Count, JsonFile, Size, shown
from decode.common.errors import InputError
from decode.common.sealed import KEPT, check_seal, sealed
from train.metric_sums import Sums

SCHEMA = 1
STATE = "state.json"


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
    rows_per_step: int = 0
    """Rows that all processes read in a step."""


class SavedSums(Content):
    """`Sums`."""

    loss: float
    loss_count: Amount
    alpha: Amount
    alpha_count: Amount
    tau: Amount
    tau_count: Amount
    tokens: Amount
    confidence_loss: float
    confidence_count: Amount
    greedy: Amount
    tau_greedy: Amount


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
    switched_at: Count | None
    start: SavedSums | None
    rows_per_step: Count

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


def write_state(checkpoint: Path, state: TrainState, world_size: int) -> None:
    """state.json, sealed."""
    SAVED.write(checkpoint / STATE, sealed({"schema": SCHEMA, "world_size": world_size, **asdict(state)}))


def read_state(checkpoint: Path) -> SavedState:
    """state.json; InputError where it is damaged, of another version, or another checkpoint's."""
    content = KEPT.read(checkpoint / STATE)
    if content.get("schema") != SCHEMA:
        raise InputError(
            f"{checkpoint} has schema {shown(content.get('schema'))}, and this version reads {SCHEMA}; resume it with "
            "the older version"
        )
    check_seal(content, checkpoint / STATE, SAVED)
    saved = SAVED.read(checkpoint / STATE)
    named = re.fullmatch(r"step_(\d+)", checkpoint.name)
    if named and int(named[1]) != saved.step:
        raise InputError(
            f"{checkpoint / STATE}: step is {saved.step}, in {checkpoint.name}: {SAVED.why}. {SAVED.remedy}"
        )
    return saved
