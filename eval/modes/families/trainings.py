"""The trainings of the comparison: which there are, how many steps each gets, and doing those that are not done. Beside
them drafts that are given as folders, ours or as others publish them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from decode.common.errors import ConfigError, InputError, RunError
from decode.common.progress import get_logger, progress
from decode.common.run_folder import check_same_run, is_finished
from decode.config import model_folder
from decode.drafters.saved_draft import OWN, config_in, describe_draft
from decode.drafters.saved_head import HEADS
from decode.models.describe import ModelDescription
from decode.models.hidden_states import FINAL
from distill import stage as recording
from distill.records.record_folder import RecordFolder
from distill.sequences import record_sequences
from eval.config import EvalConfig
from eval.modes.families.arms import ArmFacts, check_begun, record_folders, rescoring, train_config
from train import stage
from train.batches import PackedSource
from train.config import TrainConfig
from train.metrics_log import METRICS, read_metrics

NOT_TRAINED = "given, not trained here"


def tokens_per_step(train: TrainConfig, records: RecordFolder) -> float:
    """Tokens that a step reads on average: rows are packed, and their ends may stay empty."""
    packed = PackedSource.of(record_sequences(records, "train", train.sequence_length), train.sequence_length, 0)
    if not packed.rows:
        raise InputError(
            f"{records.path} holds no training records, so there is nothing to train on; record some with `python -m "
            "distill`"
        )
    rows = train.batch_size * train.gradient_accumulation
    return rows * packed.num_tokens / len(packed.rows)


def steps_for_tokens(tokens: float, per_step: float) -> int:
    """The number of steps that comes nearest to `tokens`; at least one."""
    return max(1, round(tokens / per_step))


@dataclass(frozen=True)
class Pace:
    """How fast a training went; validations and checkpoints are not counted."""

    steps: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Training tokens per second."""
        return self.tokens / self.seconds

    def steps_for_seconds(self, seconds: float) -> int:
        """Steps that take so long at this pace; at least one."""
        return max(1, round(seconds * self.steps / self.seconds))


def pace_of(folder: Path) -> Pace:
    """Of a training's metrics.jsonl: every log line tells the tokens read so far and the rate since the line before.

    InputError where it holds no such line.
    """
    tokens, seconds, steps = 0, 0.0, 0
    for line in read_metrics(folder / METRICS):
        if line.get("kind") != "train":
            continue
        if not (tokens <= (line.get("tokens") or -1) and (line.get("tokens_per_s") or 0) > 0):
            raise InputError(
                f"{folder / METRICS}: step {line['step']} has tokens={line.get('tokens')} after {tokens}, read at "
                f"tokens_per_s={line.get('tokens_per_s')}, from which no pace follows; delete {folder}"
            )
        seconds += (line["tokens"] - tokens) / line["tokens_per_s"]
        tokens, steps = line["tokens"], line["step"]
    if not steps:
        raise InputError(f"{folder / METRICS} holds no line of training, so its pace is unknown; delete {folder}")
    return Pace(steps, tokens, seconds)


T = TypeVar("T")


def in_children(call: Callable[..., T], each: Sequence[tuple[Any, ...]]) -> list[T]:
    """call(*one) for each of them at the same time, in fresh interpreters that end with this one, even where this one
    is killed.

    `call` is a function of a module. What it raises is raised here; RunError where a process dies.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(each), mp_context=context, initializer=_end_with_parent) as pool:
        try:
            return [one.result() for one in [pool.submit(call, *arguments) for arguments in each]]
        except BrokenProcessPool as error:
            raise RunError(
                "the process that trains died, most often for want of memory; what it finished is kept, so go on with "
                "resume=auto"
            ) from error


def _end_with_parent() -> None:
    """Two runs must never train into one folder: the orphan of a killed run would."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by in_children"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


Budget = Literal["tokens", "time", "given"]
"""What trainings have equal; `given` are drafts that were trained elsewhere."""
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
        """Shapes that it is measured with: all at equal tokens and of given drafts, the first one elsewhere, since wide
        passes are most of what measuring costs."""
        every = list(cfg.families.shapes)
        return every if self.budget != "time" and not self.is_coded else every[:1]

    def folder(self, cfg: EvalConfig) -> Path:
        """Where it is kept, or lies."""
        return Path(cfg.drafts[self.arm]) if self.budget == "given" else Path(cfg.families.folder) / self.name


def trainings(cfg: EvalConfig) -> list[Training]:
    """All of them: equal tokens, further codes of features, then equal time, whose steps follow from the first."""
    families, code = cfg.families, cfg.families.feature_codes[0]
    pairs = [(arm, seed) for seed in families.seeds for arm in families.arms]
    codes = families.feature_codes[1:] if families.feature_arm is not None else []
    coded = [(one, seed) for one in codes for seed in families.feature_seeds]
    return [
        *(Training(arm, "tokens", code, seed) for arm, seed in pairs),
        *(Training(str(families.feature_arm), "tokens", one, seed, True) for one, seed in coded),
        *(Training(arm, "time", code, seed) for arm, seed in pairs if families.seconds is not None),
    ]


def steps_of(cfg: EvalConfig, one: Training, per_step: float) -> int:
    """Optimizer steps of a training. At equal time they follow from the pace of the same arm and seed at equal
    tokens, which must be finished."""
    if one.budget == "tokens":
        return steps_for_tokens(cfg.families.tokens, per_step)
    assert cfg.families.seconds is not None, "there is no training of equal time then"
    return pace_of(Training(one.arm, "tokens", one.code, one.seed).folder(cfg)).steps_for_seconds(cfg.families.seconds)


def record_features(cfg: EvalConfig, wanted: Mapping[str, list[int]]) -> dict[str, str]:
    """Write the folders that are not there yet, and name them by code."""
    folders = record_folders(cfg, wanted)
    for code, layers in wanted.items():
        if not is_finished(Path(folders[code])):
            recording.run(rescoring(cfg, code, layers, folders[code]))
    return folders


def part_of(cfg: EvalConfig, part: int) -> list[Training]:
    """Of all trainings those of one of families.at_once processes: an arm's with one seed stay together, since the
    steps of one follow from the other."""
    every = trainings(cfg)
    pairs = {pair: number for number, pair in enumerate(dict.fromkeys((one.arm, one.seed) for one in every))}
    return [one for one in every if pairs[one.arm, one.seed] % cfg.families.at_once == part]


def train_all(cfg: EvalConfig, records: Mapping[str, str], every: Sequence[Training]) -> None:
    """Run those that are not finished, one after another; `records` is the folder by code of features."""
    configs = {one.arm: train_config(cfg, one.arm) for one in every}
    per_step = {arm: tokens_per_step(train, RecordFolder.open(str(train.records))) for arm, train in configs.items()}
    began = time.perf_counter()
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
    torch.use_deterministic_algorithms(False)  # engine.deterministic asked for them, and they make decoding slower
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def given(cfg: EvalConfig) -> list[Training]:
    """One for each of cfg.drafts; what is kept of them lies with that of the trainings."""
    return [Training(name, "given", cfg.families.feature_codes[0], 0) for name in cfg.drafts]


def describe_given(cfg: EvalConfig, target: ModelDescription) -> dict[str, ArmFacts]:
    """Facts of every given draft; InputError where one does not fit the target or saw the held-out texts, ConfigError
    where it is called like an arm."""
    taken = sorted(set(cfg.drafts) & set(cfg.families.arms))
    if taken:
        raise ConfigError(f"drafts.{taken[0]} is called like an arm of families.arms; give it another name")
    return {name: _facts(cfg, name, target) for name in cfg.drafts}


def _facts(cfg: EvalConfig, name: str, target: ModelDescription) -> ArmFacts:
    folder = model_folder(cfg.drafts[name])
    found = describe_draft(folder, target, f"drafts.{name}")
    check_begun(cfg, f"drafts.{name}", found.path, target)
    taps: tuple[int, ...] = ()
    if found.family in HEADS:
        taps = (FINAL,) if folder == OWN else config_in(folder, target).taps
    return ArmFacts(found.family, found.num_parameters, taps, NOT_TRAINED)
