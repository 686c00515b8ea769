"""The distill stage: validate, plan, load the target, then shard by shard sample responses, score them, write them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from decode.common.checked_json import Content, Count, JsonFile, Sha256, Text, write_atomically
from decode.common.errors import InputError
from decode.common.progress import get_logger, progress
from decode.common.run_folder import RunFolder, check_run, free_disk_check, open_run
from decode.models.fingerprint import weights_fingerprint
from decode.models.hidden_states import check_taps
from decode.models.load import ModelDescription, describe_model, load_model
from distill.config import DistillConfig
from distill.prompts.shown_examples import write_lines
from distill.prompts.text_sources import Texts, open_texts
from distill.recording_plan import RecordingPlan
from distill.records.feature_codes import FeatureCode
from distill.records.feature_fitting import CODE_FILE, calibrate, load_code
from distill.records.record_folder import RecordWriter
from distill.scorer import Scorer
from distill.target_passes import Passes


class PromptsNote(Content):
    """prompts.json: the texts that a run was started with."""

    sha256: Sha256
    prompts: Count


NOTE = JsonFile(
    PromptsNote,
    "a resumed run could mix its records with those of other texts",
    "Delete the folder, or use another output_dir.",
)
SLOWEST_RANK = timedelta(days=7)  # the first rank to finish waits for the last one this long


class TargetNote(Content):
    """target.json: which weights the records are made from, by their files and in memory."""

    fingerprint: Text
    weights: Text | None


TARGET_FILE = "target.json"
TARGET = JsonFile(TargetNote, "records of two targets could be mixed", "Delete the folder, or use another output_dir.")

log = get_logger("distill")


def run(config: DistillConfig) -> None:
    """Write a record folder. Raises ConfigError and InputError before any weight is loaded."""
    target = describe_model(config.target)
    if config.records.features.layers:
        check_taps(target.config, config.records.features.layers, target.path)
    if not config.plan and check_run(config.output_dir, "distill", config, config.resume):
        return
    # without cpu=True every rank on a machine without an accelerator believes that it is alone, and writes every shard
    ranks = PartialState(cpu=not torch.accelerator.is_available(), timeout=SLOWEST_RANK)
    texts = open_texts(config, target)
    plan = texts.plan()
    if ranks.is_main_process:
        write_lines([*texts.examples(), *(plan.lines() if config.plan else [])])
    if config.plan:
        return
    free_disk_check(config.output_dir, plan.bytes_on_disk)
    with open_run(config.output_dir, "distill", config, config.resume, ranks.is_main_process) as folder:
        if folder.is_finished:
            return
        _check_same_texts(folder, texts, ranks)
        _check_same_target(folder, target)
        records = _write_shards(config, plan, target, texts, folder, ranks)
        ranks.wait_for_everyone()
        if ranks.is_main_process:
            _finish(config, plan, target, texts, records)


def _check_same_texts(folder: RunFolder, texts: Texts, ranks: PartialState) -> None:
    """Bind the folder to these texts, so that a corpus that changed since a run was killed is not mixed into it."""
    note, now = folder.file("prompts.json"), texts.sha256
    if note.is_file():
        before = NOTE.read(note).sha256
        if before != now:
            raise InputError(
                f"the prompts of {folder.path} had SHA-256 {before}, and now have {now}: {texts.origin} changed since "
                "that run started, and its records would be mixed. Use another output_dir"
            )
    elif ranks.is_main_process:
        NOTE.write(note, {"sha256": now, "prompts": texts.num_prompts})


def _check_same_target(folder: RunFolder, target: ModelDescription) -> None:
    """The same of the target: files that were replaced under its path would make the other half of the records."""
    note = folder.file(TARGET_FILE)
    before = TARGET.read(note).fingerprint if note.is_file() else target.fingerprint
    if before != target.fingerprint:
        raise InputError(
            f"target.path={target.path} had fingerprint {before} when the run in {folder.path} started, and now has "
            f"{target.fingerprint}: records of two targets would be mixed. Use another output_dir"
        )


def _write_shards(
    config: DistillConfig,
    plan: RecordingPlan,
    target: ModelDescription,
    texts: Texts,
    folder: RunFolder,
    ranks: PartialState,
) -> RecordWriter:
    """Write this rank's shards: every n-th of them, less those that a killed run has left."""
    model = cache(lambda: _load(config, target, folder, ranks))
    code = _feature_code(config, plan, texts, model, folder, ranks)
    records = RecordWriter(folder, plan.layout)
    mine = {
        index: range(index * plan.shard_size, min((index + 1) * plan.shard_size, texts.num_prompts))
        for index in range(ranks.process_index, plan.num_shards, ranks.num_processes)
    }
    todo = [index for index in mine if records.existing(index) is None]
    if not todo:
        return records
    writer = texts.writer(model())
    scorer = Scorer(model(), plan.layout, config.seed, config.batch_size, code)
    total, left = sum(map(len, mine.values())), sum(len(mine[index]) for index in todo)
    with progress(total, "prompts", "records", initial=total - left) as bar:
        began, tokens = time.perf_counter(), 0
        for index in todo:
            part = writer.write(mine[index].start, mine[index].stop)
            scorer.score(part)
            tokens += records.write(index, part).learned_tokens
            bar.update(len(mine[index]), tokens_per_s=round(tokens / (time.perf_counter() - began)))
    if writer.dropped_turns:
        log.warning("%d turns were left out: they do not fit into the target's context", writer.dropped_turns)
    return records


def _load(config: DistillConfig, target: ModelDescription, folder: RunFolder, ranks: PartialState) -> PreTrainedModel:
    """The target; rank 0, which writes the first shard and so always loads it, notes which it is."""
    log.info("loading %s", config.target.path)
    model = load_model(config.target)
    if ranks.is_main_process:
        note = {"fingerprint": target.fingerprint, "weights": weights_fingerprint(model)}
        TARGET.write(folder.file(TARGET_FILE), note)
    return model


def _feature_code(
    config: DistillConfig,
    plan: RecordingPlan,
    texts: Texts,
    model: Callable[[], PreTrainedModel],
    folder: RunFolder,
    ranks: PartialState,
) -> FeatureCode | None:
    """The code of the hidden states, None without any. Rank 0 fits it to the texts of the run's first prompts and
    writes it before any shard, so that a shard is the same from whatever rank and after whatever kill."""
    layout = plan.layout.features
    if layout is None:
        return None
    file = folder.file(CODE_FILE)
    if layout.is_fitted and ranks.is_main_process and not file.is_file():
        first = texts.writer(model()).write(0, config.records.features.calibration_prompts)
        write_atomically(file, calibrate(layout, first, Passes(model(), layout.layers, config.batch_size)))
    ranks.wait_for_everyone()
    return load_code(layout, folder.path)


def _finish(
    config: DistillConfig, plan: RecordingPlan, target: ModelDescription, texts: Texts, records: RecordWriter
) -> None:
    about: dict[str, Any] = {"seed": config.seed, "p": "temperature 1, unwarped", **texts.provenance()}
    note = records.run.file(TARGET_FILE)  # a run that an earlier version started has none
    weights = TARGET.read(note).weights if note.is_file() else None
    manifest = records.finish(plan.num_shards, target, weights, about)
    counts = manifest["counts"]
    log.info(
        "%s: %d records, %d tokens, %d of them with p, %d bytes (%.1f a token)",
        records.run.path,
        counts["records"],
        counts["tokens"],
        counts["learned_tokens"],
        counts["bytes"],
        counts["bytes"] / max(1, counts["tokens"]),
    )
    if manifest["feature_errors"]:
        told = ", ".join(f"{layer}: {error:.2%}" for layer, error in manifest["feature_errors"].items())
        log.info("hidden states coded as %s, relative error of each layer: %s", config.records.features.code, told)
