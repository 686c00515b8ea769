"""`python -m train`: from checked inputs to an exported model, resumable at any instant."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from decode.common.errors import ConfigError
from decode.common.progress import get_logger, is_main_process
from decode.common.run_folder import RUN, RunFolder, check_run, free_disk_check, on_main, open_run
from decode.common.typed_config import build, known_part
from decode.config import ModelConfig
from decode.models.compatibility import load_tokenizer
from decode.models.load import describe_model, load_model
from decode.models.output_head import Ends, OutputHead, ends_of, head_of
from decode.models.small import load_ends
from distill.prompts.run_chats import bound_to, with_day
from train.batches import StepReader
from train.checkpoint import (
    Checkpoints,
    TrainState,
    adopt,
    check_whole,
    find_checkpoint,
    read_state,
    saved_optimizer,
)
from train.config import TrainConfig
from train.engine import build_accelerator, check_launcher, warn_of_emulated_products
from train.live_target import LiveTarget
from train.loss import DraftLoss
from train.metrics_log import METRICS, MetricsLog
from train.optimizers import Schedule, build_optimizers
from train.packing import Order
from train.run_result import keep_result
from train.settled import chosen_optimizer, settled
from train.trackers import build_tracker, check_tracker
from train.training_inputs import Inputs, check_enough, open_inputs, tokenizer_folder
from train.training_loop import Compute, Recorder, TrainingLoop
from train.training_plan import TrainingPlan

logger = get_logger("train")


def run(cfg: TrainConfig) -> None:
    """Train what `cfg` says into `cfg.output_dir`; raises UserError before any weight is loaded, RunError later."""
    check_launcher(cfg.engine)
    check_tracker(cfg)
    cfg, bound = _with_chats(cfg)
    if not cfg.plan and check_run(cfg.output_dir, "train", cfg, cfg.resume, bound):
        return
    _check_resume(cfg)
    inputs = open_inputs(cfg)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rows_per_step = check_enough(cfg, inputs, world_size)
    known = settled(cfg, inputs.blueprint, inputs.vocab_size)
    plan = TrainingPlan.of(known, inputs, rows_per_step)
    for line in [*plan.lines(), *(plan.advice() if cfg.plan else ())]:
        logger.info("plan: %s", line)
    for line in plan.warnings() if is_main_process() else ():
        logger.warning("%s", line)
    if is_main_process():
        warn_of_emulated_products(cfg.engine)
    if cfg.plan:
        return
    free_disk_check(cfg.output_dir, plan.disk_bytes)
    accelerator = build_accelerator(cfg)
    data = on_main(accelerator.is_main_process, lambda: cfg.data)
    if data != cfg.data:  # midnight fell between the starts of two ranks
        inputs = open_inputs(replace(cfg, data=data))
    with open_run(cfg.output_dir, "train", cfg, cfg.resume, accelerator.is_main_process, bound) as folder:
        if not folder.is_finished:
            _train(known, inputs, accelerator, folder, rows_per_step)


def _with_chats(cfg: TrainConfig) -> tuple[TrainConfig, dict[str, str | None]]:
    """`cfg` with the day that its chats are of, and what a run on text is bound to; a tokenizer that is trained on the
    text lies in the run's folder."""
    if cfg.data is None or cfg.tokenizer.train_entries is not None:
        return cfg, {}
    has_target = cfg.target.path is not None
    source = cfg.target if has_target else ModelConfig(path=cfg.tokenizer.path)
    tokenizer = describe_model(source).tokenizer if has_target else load_tokenizer(source)
    return replace(cfg, data=with_day(cfg.data, tokenizer, cfg.output_dir)), bound_to(tokenizer)


def _train(cfg: TrainConfig, inputs: Inputs, accelerator: Accelerator, folder: RunFolder, rows_per_step: int) -> None:
    start_from = _resume_point(cfg)  # now that no other process can add or remove a checkpoint
    if accelerator.is_main_process and cfg.tokenizer.train_entries is not None:
        keep_tokenizer(inputs, tokenizer_folder(cfg))
    compute, head = build_compute(cfg, inputs, accelerator)
    split = (accelerator.process_index, accelerator.num_processes, cfg.gradient_accumulation, cfg.batch_size)
    reader = StepReader(inputs.train, Order(len(inputs.train.rows), rows_per_step, cfg.seed), split, head)
    checkpoints = Checkpoints(folder.path / "checkpoints", cfg.keep_checkpoints)
    state = _restore(accelerator, checkpoints, folder.path, start_from)
    log = MetricsLog(folder.file(METRICS), state.log_position) if accelerator.is_main_process else None
    tracker = build_tracker(cfg, folder.path, _run_id(folder.path), accelerator.is_main_process)
    recorder = Recorder(checkpoints, log, tracker)
    loop = TrainingLoop(cfg, compute, reader, inputs.validation, recorder, state)
    state = loop.run()
    if accelerator.is_main_process:
        keep_result(cfg, inputs, folder, state, recorder, compute.ends, loop.validation_batches())
    accelerator.wait_for_everyone()
    accelerator.end_training()


def keep_tokenizer(inputs: Inputs, folder: Path) -> None:
    """Save a tokenizer that was trained here, once and whole: a resumed run reads the folder as soon as it is there."""
    if folder.is_dir():
        return
    draft = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    inputs.tokenizer.save_pretrained(draft)
    draft.rename(folder)


def build_compute(cfg: TrainConfig, inputs: Inputs, accelerator: Accelerator) -> tuple[Compute, OutputHead | None]:
    """The prepared draft with its optimizers, and the target's head where recorded hidden states need it."""
    target, ends = _load_target(cfg, inputs, accelerator.device)
    set_seed(cfg.seed)
    draft = inputs.blueprint.build(ends)
    module = DraftLoss(draft.module, cfg.objective, inputs.window_along_rows)
    optimizers = build_optimizers(module, draft.token_tables(), cfg)
    schedule = Schedule(optimizers, cfg)
    accelerator.wait_for_everyone()  # here, since DeepSpeed's own groups give a rank that still loads ten minutes
    prepared = accelerator.prepare(module, *optimizers)
    live = None
    if target is not None and cfg.target_source == "live":
        live = LiveTarget(target, inputs.blueprint.layers_read)
    head = ends.head if ends is not None else head_of(target) if target is not None else None
    return Compute(accelerator, prepared[0], list(prepared[1:]), schedule, live, ends), head


def _load_target(cfg: TrainConfig, inputs: Inputs, device: torch.device) -> tuple[PreTrainedModel | None, Ends | None]:
    """What of the target this process needs: all of it where it runs alongside, else the ends that heads work between,
    or its output head (with the rest) where recorded hidden states become p through it."""
    is_live, reads_states = cfg.target_source == "live", bool(inputs.blueprint.layers_read)
    if reads_states and not is_live:
        return None, load_ends(replace(cfg.target, device=str(device), device_map=None))
    if not is_live and not inputs.needs_target_weights:
        return None, None
    target = load_model(_on(cfg.target, device))
    return target, ends_of(target) if reads_states else None


def _restore(accelerator: Accelerator, checkpoints: Checkpoints, folder: Path, start_from: Path | None) -> TrainState:
    if start_from is None:
        if accelerator.is_main_process:
            checkpoints.forget_after(-1)
        return TrainState()
    if accelerator.is_main_process:
        if folder.resolve() not in start_from.resolve().parents:
            start_from = adopt(start_from, folder)
        checkpoints.forget_after(read_state(start_from).step)
    accelerator.wait_for_everyone()
    start_from = checkpoints.newest()
    assert start_from is not None
    state = checkpoints.restore(accelerator, start_from)
    logger.info("resumed from %s", start_from)
    return state


def _resume_point(cfg: TrainConfig) -> Path | None:
    if cfg.resume == "never":
        return None
    if cfg.resume == "auto":
        newest = Checkpoints(Path(cfg.output_dir) / "checkpoints", cfg.keep_checkpoints).newest() or _not_adopted(cfg)
    else:
        newest = find_checkpoint(Path(cfg.resume))
    if newest is not None:
        check_whole(newest)
    return newest


def _not_adopted(cfg: TrainConfig) -> Path | None:
    """The checkpoint of another run that this one was to start from, where it was stopped before it had copied it."""
    run = Path(cfg.output_dir) / "run.json"
    resume = RUN.read(run).config["resume"] if run.is_file() else "never"
    return None if resume in ("never", "auto") else find_checkpoint(Path(resume))


def _check_resume(cfg: TrainConfig) -> None:
    """A checkpoint of another run must at least hold the same weights and optimizer state, sharded the same way."""
    if cfg.plan or cfg.resume in ("never", "auto"):
        return
    checkpoint = find_checkpoint(Path(cfg.resume))
    theirs = _of_this_version(RUN.read(checkpoint.parent.parent / "run.json").config)
    # what auto stood for is what lies there: an earlier version chose by rules of its own
    theirs |= {"optimizer": saved_optimizer(checkpoint)}
    ours: dict[str, Any] = asdict(cfg) | {"optimizer": chosen_optimizer(cfg)}
    for where in (("draft",), ("optimizer",), ("engine", "name"), ("target", "path")):
        there, here = theirs, ours
        for key in where:
            there, here = there.get(key, "unset") if isinstance(there, dict) else "unset", here[key]
        if there != here:
            raise ConfigError(
                f"resume={cfg.resume} was made with {'.'.join(where)}={there}, and this run has {here}: its weights "
                "and optimizer state would not fit. Give the same value, or start with draft.init_from instead"
            )


def _of_this_version(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration without fields that are gone since, and with those that came at their defaults; as it is
    where this version refuses it."""
    try:
        return asdict(build(TrainConfig, known_part(TrainConfig, config)))
    except ConfigError:
        return config


def _run_id(folder: Path) -> str:
    """The same for every part of a run that was interrupted."""
    if not is_main_process():
        return ""
    started = RUN.read(folder / "run.json").started
    return hashlib.sha256(f"{folder.absolute()} {started}".encode()).hexdigest()[:12]


def _on(target: ModelConfig, device: torch.device) -> ModelConfig:
    return target if target.device_map else replace(target, device=str(device))
