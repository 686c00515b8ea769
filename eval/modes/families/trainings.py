"""The trainings of the suite: which there are, and doing those that are not done."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decode.common.progress import get_logger, progress
from decode.common.run_folder import check_same_run, is_finished
from distill.records.record_folder import RecordFolder
from eval.config import EvalConfig
from eval.modes.families.arms import train_config
from eval.modes.families.budgets import pace_of, steps_for_tokens, tokens_per_step
from train import stage
from train.config import TrainConfig

Budget = Literal["tokens", "time"]
log = get_logger("eval")


@dataclass(frozen=True)
class Training:
    """One arm, budget, code of features and seed."""

    arm: str
    budget: Budget
    code: str
    seed: int
    is_coded: bool = False
    """Part of the comparison of codes alone."""

    @property
    def name(self) -> str:
        """Of its folder."""
        middle = f"{self.budget}-{self.code}" if self.is_coded else self.budget
        return f"{self.arm}-{middle}-{self.seed}"

    def shapes(self, cfg: EvalConfig) -> list[str]:
        """Shapes that it is measured with: all at equal tokens, the first one elsewhere, since wide passes are most of
        what measuring costs."""
        every = list(cfg.families.shapes)
        return every if self.budget == "tokens" and not self.is_coded else every[:1]

    def folder(self, cfg: EvalConfig) -> Path:
        """Where it is kept."""
        return Path(cfg.families.folder) / self.name


def trainings(cfg: EvalConfig) -> list[Training]:
    """All of them: equal tokens, further codes of features, then equal time, whose steps follow from the first."""
    families, code = cfg.families, cfg.families.feature_codes[0]
    pairs = [(arm, seed) for seed in families.seeds for arm in families.arms]
    codes = families.feature_codes[1:] if families.feature_arm is not None else []
    coded = [(one, seed) for one in codes for seed in families.feature_seeds]
    return [
        *(Training(arm, "tokens", code, seed) for arm, seed in pairs),
        *(Training(str(families.feature_arm), "tokens", one, seed, True) for one, seed in coded),
        *(Training(arm, "time", code, seed) for arm, seed in pairs),
    ]


def steps_of(cfg: EvalConfig, one: Training, per_step: float) -> int:
    """Optimizer steps of a training. At equal time they follow from the pace of the same arm and seed at equal
    tokens, which must be finished."""
    if one.budget == "tokens":
        return steps_for_tokens(cfg.families.tokens, per_step)
    return pace_of(Training(one.arm, "tokens", one.code, one.seed).folder(cfg)).steps_for_seconds(cfg.families.seconds)


def train_all(cfg: EvalConfig, records: Mapping[str, str]) -> None:
    """Run every training that is not finished, one after another; `records` is the folder by code of features."""
    source = RecordFolder.open(cfg.families.records, checksums=False)
    per_step = {arm: tokens_per_step(train_config(cfg, arm), source) for arm in cfg.families.arms}
    every, began = trainings(cfg), time.perf_counter()
    with progress(len(every), "trainings", "training") as bar:
        for one in every:
            steps = steps_of(cfg, one, per_step[one.arm])
            own = {"records": records[one.code], "seed": one.seed, "output_dir": str(one.folder(cfg))}
            train_one(train_config(cfg, one.arm, steps=steps, **own))
            bar.update(1, done=one.name)
    log.info("trainings: %.0f s", time.perf_counter() - began)


def train_one(train: TrainConfig) -> None:
    """One training by the trainer's own stage, unless it is finished; ConfigError where that was another one.

    Its checkpoints go when it is finished: nothing resumes from them.
    """
    folder = Path(train.output_dir)
    if is_finished(folder):
        check_same_run(folder, "train", train)
        return
    stage.run(train)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
