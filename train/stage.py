"""`python -m train`: from checked inputs to an exported model, resumable at any instant."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from decode.common.errors import ConfigError
from decode.common.progress import get_logger, is_main_process
from decode.common.run_folder import RUN, RunFolder, check_run, free_disk_check, on_main, open_run
from decode.common.typed_config import build
from decode.config import ModelConfig
from decode.models.compatibility import load_tokenizer
from decode.models.describe import describe_model
from decode.models.load import load_model
from decode.models.output_head import Ends, OutputHead, ends_of, head_of
from decode.models.small import load_ends
from distill.prompts.run_chats import bound_to, with_day
from train.batches import StepReader, readers_of
from train.checkpoints.resuming import adopt, check_ranks, check_whole, find_checkpoint
from train.checkpoints.run_checkpoints import Checkpoints, save_unwrapped
from train.checkpoints.state import TrainState, read_state
from train.config import TrainConfig
from train.engine import build_accelerator, check_launcher, warn_of_emulated_products
from train.fully_sharded import keep_in_checkpoints, shard_draft, shard_target
from train.live_target import LiveTarget
from train.loss import DraftLoss
from train.memory_plan import memory_lines
from train.metrics_log import METRICS, MetricsLog
from train.optimizers import Schedule, build_optimizers
from train.packing import Order
from train.run_result import keep_result
from train.served_target import check_same_server, served
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
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if not cfg.plan and check_run(cfg.output_dir, "train", cfg, cfg.resume, bound):
        _check_finished(cfg, world_size)
        return
    _check_resume(cfg)
    accelerator = build_accelerator(cfg) if world_size > 1 else None  # first, since ranks share what rank 0 reads
    is_first = accelerator is None or accelerator.is_main_process
    cfg = replace(cfg, data=on_main(is_first, lambda: cfg.data))  # midnight may fall between their starts
    inputs = open_inputs(cfg)
    rows_per_step = check_enough(cfg, inputs, world_size)
    known = settled(cfg, inputs.blueprint, inputs.widest_row(cfg.makes_p))
    plan = TrainingPlan.of(known, inputs, rows_per_step)
    memory = memory_lines(known, inputs, world_size) if cfg.plan and is_main_process() else []
    for line in [*plan.lines(), *memory, *(plan.advice() if cfg.plan else ())]:
        logger.info("plan: %s", line)
    for line in plan.warnings() if is_main_process() else ():
        logger.warning("%s", line)
    if is_main_process():
        warn_of_emulated_products(cfg.engine)
    if cfg.plan:
        return
    free_disk_check(cfg.output_dir, plan.disk_bytes)
    accelerator = accelerator or build_accelerator(cfg)
    is_main = accelerator.is_main_process
    with (
        served(known, inputs, accelerator.process_index, accelerator.device) as (completed, ends),
        open_run(cfg.output_dir, "train", cfg, cfg.resume, is_main, bound | _learned_from(inputs, is_main)) as folder,
    ):
        if not folder.is_finished:
            check_same_server(completed, folder.path, is_main)
            _train(known, completed, ends, accelerator, folder, rows_per_step)


def _check_finished(cfg: TrainConfig, world_size: int) -> None:
    """A finished run is this one if it made the same steps: run.json says those it was begun with, not what it went on
    with."""
    run = Path(cfg.output_dir)
    newest, rows = Checkpoints(run / "checkpoints", 1).newest(), cfg.batch_size * cfg.gradient_accumulation
    if newest is not None and rows * read_state(newest).world_size != read_state(newest).rows_per_step:
        check_ranks(newest, world_size, rows * world_size, is_bound=False)


def _with_chats(cfg: TrainConfig) -> tuple[TrainConfig, dict[str, str | None]]:
    """`cfg` with the day that its chats are of, and what a run on text is bound to; a tokenizer that is trained on the
    text lies in the run's folder."""
    if cfg.data is None or cfg.tokenizer.train_entries is not None:
        return cfg, {}
    has_target = cfg.target.path is not None
    source = cfg.target if has_target else ModelConfig(path=cfg.tokenizer.path)
    tokenizer = describe_model(source).tokenizer if has_target else load_tokenizer(source)
    return replace(cfg, data=with_day(cfg.data, tokenizer, cfg.output_dir)), bound_to(tokenizer)


def _learned_from(inputs: Inputs, is_main: bool) -> dict[str, str | None]:
    """What a run that goes on has to find as it was: texts and records by their bytes, and a target that gives states
    or p in training. Rank 0 alone binds the folder."""
    if not is_main:
        return {}
    sources = (inputs.train.source, inputs.validation.source)
    target = inputs.target
    weights = None if target is None else target.stored_fingerprint or target.fingerprint
    return {"data_hash": sha256("".join(one.sha256 for one in sources).encode()).hexdigest(), "target_weights": weights}


def _train(
    cfg: TrainConfig,
    inputs: Inputs,
    ends: Ends | None,
    accelerator: Accelerator,
    folder: RunFolder,
    rows_per_step: int,
) -> None:
    """`ends` are the target's, where they are in memory already."""
    start_from = _resume_point(cfg)  # now that no other process can add or remove a checkpoint
    if start_from is not None:
        check_ranks(start_from, accelerator.num_processes, rows_per_step, bool(cfg.engine.zero_stage))
    if accelerator.is_main_process and cfg.tokenizer.train_entries is not None:
        keep_tokenizer(inputs, tokenizer_folder(cfg))
    compute, head = build_compute(cfg, inputs, accelerator, ends)
    split = (accelerator.process_index, accelerator.num_processes, cfg.gradient_accumulation, cfg.batch_size)
    order = Order(len(inputs.train.rows), rows_per_step, cfg.seed)
    readers = readers_of(inputs.train.source, accelerator.device.type)
    reader = StepReader(inputs.train, order, split, head, readers, is_pinned=accelerator.device.type == "cuda")
    checkpoints = Checkpoints(folder.path / "checkpoints", cfg.keep_checkpoints)
    state = replace(_restore(accelerator, checkpoints, folder.path, start_from), rows_per_step=rows_per_step)
    log = MetricsLog(folder.file(METRICS), state.log_position) if accelerator.is_main_process else None
    tracker = build_tracker(cfg, folder.path, _run_id(folder.path), accelerator.is_main_process)
    recorder = Recorder(checkpoints, log, tracker)
    loop = TrainingLoop(cfg, compute, reader, inputs.validation, recorder, state)
    state = loop.run()
    if accelerator.is_main_process:
        keep_result(cfg, inputs, folder, state, recorder, compute.ends, loop.validation_batches())
    elif compute.calibrates_together:  # rank 0's batches pass through a target of which this process holds a part
        for _ in loop.validation_batches():
            pass
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


def build_compute(
    cfg: TrainConfig, inputs: Inputs, accelerator: Accelerator, ends: Ends | None = None
) -> tuple[Compute, OutputHead | None]:
    """The prepared draft with its optimizers, and the target's head where recorded hidden states need it."""
    target = None
    if ends is None:
        target, ends = _load_target(cfg, inputs, accelerator)
    set_seed(cfg.seed)
    draft = inputs.blueprint.build(ends)
    if cfg.engine.recompute:
        draft.recompute()
    module = DraftLoss(draft.module, cfg.objective, inputs.window_along_rows)
    accelerator.wait_for_everyone()  # here, since DeepSpeed's own groups give a rank that still loads ten minutes
    is_fsdp = cfg.engine.name == "fsdp2"
    if is_fsdp:
        shard_draft(module, draft.blocks(), accelerator.device)
    optimizers = build_optimizers(module, draft.token_tables(), cfg, accelerator.device)
    schedule = Schedule(optimizers, cfg)
    if is_fsdp:
        keep_in_checkpoints(accelerator, module, optimizers)
    elif not cfg.engine.zero_stage:
        save_unwrapped(accelerator)
    prepared = (module, *optimizers) if is_fsdp else accelerator.prepare(module, *optimizers)
    live = None
    if target is not None and cfg.target_source == "live":
        live = LiveTarget(target, inputs.blueprint.layers_read)
    head = ends.head if ends is not None else head_of(target) if target is not None else None
    return Compute(accelerator, prepared[0], list(prepared[1:]), schedule, live, ends), head


def _load_target(
    cfg: TrainConfig, inputs: Inputs, accelerator: Accelerator
) -> tuple[PreTrainedModel | None, Ends | None]:
    """What of the target this process needs: all of it where it runs alongside, else the ends that heads work between,
    or its output head (with the rest) where recorded hidden states become p through it."""
    is_live, reads_states = cfg.target_source == "live", bool(inputs.blueprint.layers_read)
    device = accelerator.device
    if reads_states and not is_live:
        return None, load_ends(replace(cfg.target, device=str(device), device_map=None))
    if not is_live and not inputs.needs_target_weights:
        return None, None
    if is_live and cfg.engine.name == "fsdp2":
        source = replace(cfg.target, device="cpu")
        target = shard_target(lambda: load_model(source, computes_on=device), accelerator)
    else:
        target = load_model(_on(cfg.target, device))
    return target, ends_of(target) if reads_states else None


def _restore(accelerator: Accelerator, checkpoints: Checkpoints, folder: Path, start_from: Path | None) -> TrainState:
    if start_from is None:
        if accelerator.is_main_process:
            checkpoints.forget_after(-1)
        return TrainState()
    if accelerator.is_main_process:
        if not _is_of(start_from, folder):
            start_from = adopt(start_from, folder)
        checkpoints.forget_after(read_state(start_from).step)
    accelerator.wait_for_everyone()
    start_from = checkpoints.newest()
    assert start_from is not None
    state = checkpoints.restore(accelerator, start_from)
    logger.info("resumed from %s", start_from)
    return state


def _is_of(checkpoint: Path, run: Path) -> bool:
    return run.resolve() in checkpoint.resolve().parents


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
    other = build(TrainConfig, RUN.read(checkpoint.parent.parent / "run.json").config)
    theirs: Any = asdict(other) | {"optimizer": chosen_optimizer(other)}
    ours: Any = asdict(cfg) | {"optimizer": chosen_optimizer(cfg)}
    for where in (("draft",), ("optimizer",), ("engine", "name"), ("target", "path")):
        there, here = theirs, ours
        for key in where:
            there, here = there[key], here[key]
        if there != here:
            raise ConfigError(
                f"resume={cfg.resume} was made with {'.'.join(where)}={there}, and this run has {here}: its weights "
                "and optimizer state would not fit. Give the same value, or start with draft.init_from instead"
            )
    done = read_state(checkpoint).step
    if not _is_of(checkpoint, Path(cfg.output_dir)) and done >= cfg.steps:
        raise ConfigError(
            f"resume={cfg.resume} has done {done} steps, and steps={cfg.steps} counts these: nothing would be learned. "
            f"Use steps={done + cfg.steps}, or draft.init_from instead to start from its weights"
        )


def _run_id(folder: Path) -> str:
    """The same for every part of a run that was interrupted."""
    if not is_main_process():
        return ""
    started = RUN.read(folder / "run.json").started
    return sha256(f"{folder.absolute()} {started}".encode()).hexdigest()[:12]


def _on(target: ModelConfig, device: torch.device) -> ModelConfig:
    return target if target.device_map else replace(target, device=str(device))
