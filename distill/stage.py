"""The distill stage: validate, plan, load the target, then shard by shard sample responses, score them, write them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from decode.common.checked_json import write_atomically
from decode.common.progress import get_logger, progress
from decode.common.run_folder import SLOWEST_RANK, RunFolder, check_run, free_disk_check, on_main, open_run
from decode.models.describe import ModelDescription, describe_model
from decode.models.head_targets import check_taps
from decode.sampling.own_settings import RESTING, say_others
from distill.config import DistillConfig
from distill.engines.vllm_support import check_alone
from distill.prompts.prompt_texts import FOLDER
from distill.prompts.run_chats import bound_to, with_day
from distill.prompts.shown_examples import write_lines
from distill.prompts.text_sources import Texts, open_texts
from distill.recording_plan import RecordingPlan
from distill.records.feature_codes import FeatureCode
from distill.records.feature_fitting import CODE_FILE, calibrate, load_code
from distill.records.record_folder import RecordWriter
from distill.records.record_manifest import ShardSummary
from distill.records.record_shards import Record, drafting_of
from distill.run_notes import check_same_target, keep_texts, note_target, noted_weights
from distill.runtimes.openai_runtime import OpenAiRuntime
from distill.runtimes.runtime import Runtime, check_room, recorded
from distill.runtimes.served_runtime import ServedRuntime
from distill.runtimes.transformers_runtime import TransformersRuntime
from distill.runtimes.vllm_runtime import VllmRuntime
from distill.scorer import Scorer
from distill.told_texts import ToldTexts

log = get_logger("distill")


def run(config: DistillConfig) -> None:
    """Write a record folder. Raises ConfigError and InputError before any weight is loaded."""
    target = describe_model(config.target, loads=config.target.runtime == "transformers")
    if config.records.features.layers:
        check_taps(target.config, config.records.features.layers, target.path)
    if config.responses != "records":
        config = replace(config, data=with_day(config.data, target.tokenizer, config.output_dir))
    if not config.plan and check_run(
        config.output_dir, "distill", config, config.resume, bound_to=bound_to(target.tokenizer)
    ):
        return
    runtime = open_runtime(config, target)
    # without cpu=True every rank on a machine without an accelerator believes that it is alone, and writes every shard
    ranks = PartialState(cpu=not torch.accelerator.is_available(), timeout=SLOWEST_RANK)
    config = on_main(ranks.is_main_process, lambda: config)  # midnight may fall between the starts of two ranks
    with open_texts(config, target) as texts:
        plan = on_main(ranks.is_main_process, lambda: _planned(config, texts, runtime))
        if not config.plan:
            _record(config, plan, target, texts, runtime, ranks)
    ranks.destroy_process_group()  # left to the interpreter's end, it may abort a rank that has done its work


def open_runtime(config: DistillConfig, target: ModelDescription) -> Runtime:
    """What runs the target; loads nothing. Raises ConfigError and InputError for a target or an environment with which
    it cannot work."""
    dtype = target.dtype_name
    if config.target.runtime == "transformers":
        return TransformersRuntime(config, target, dtype)
    if config.target.runtime == "openai":
        return OpenAiRuntime(config, target)
    if config.target.url is None:
        return VllmRuntime(config, target, dtype)
    check_alone()  # of a training each process has a server's passes of its own
    return ServedRuntime(config, target, dtype)


def _planned(config: DistillConfig, texts: Texts, runtime: Runtime) -> RecordingPlan:
    """Read the texts, show what was asked for, and refuse what cannot be done; rank 0."""
    if config.responses == "target":
        used = vars(config.sampling)
        written = {name: f"sampling.{name}={{}}" for name in RESTING if name in used}
        say_others(texts.target.generation_config, used, texts.target.path, written, of_run=True)
    texts.read(Path(config.output_dir))
    plan = texts.plan()
    write_lines([*texts.examples(), *([*plan.lines(), *runtime.memory(plan.longest)] if config.plan else [])])
    check_room(runtime.draft, plan.longest)
    if not config.plan:
        free_disk_check(config.output_dir, plan.bytes_on_disk)
    return plan


def _record(
    config: DistillConfig,
    plan: RecordingPlan,
    target: ModelDescription,
    texts: Texts,
    runtime: Runtime,
    ranks: PartialState,
) -> None:
    runtime.prepare(plan.longest)
    is_main, bound = ranks.is_main_process, bound_to(target.tokenizer)
    with open_run(config.output_dir, "distill", config, config.resume, is_main, bound) as folder, runtime:
        if folder.is_finished:
            return
        on_main(is_main, lambda: keep_texts(folder, texts))
        texts.open(folder.path)
        check_same_target(folder, target, runtime.note, is_main)
        records = _write_shards(config, plan, target, texts, runtime, folder, ranks)
        ranks.wait_for_everyone()
        if is_main:
            _finish(config, plan, target, texts, runtime, records)
        ranks.wait_for_everyone()


def _write_shards(
    config: DistillConfig,
    plan: RecordingPlan,
    target: ModelDescription,
    texts: Texts,
    runtime: Runtime,
    folder: RunFolder,
    ranks: PartialState,
) -> RecordWriter:
    """Write this rank's shards: every n-th of them, less those that a killed run has left."""
    mine = {
        index: range(index * plan.shard_size, min((index + 1) * plan.shard_size, texts.num_prompts))
        for index in range(ranks.process_index, plan.num_shards, ranks.num_processes)
    }
    if runtime.writes_first and config.responses == "target":
        _write_responses(calls(mine.values(), CALL * config.batch_size), texts, runtime)
    code = _feature_code(config, plan, texts, runtime, folder, ranks)
    records = RecordWriter(folder, plan.layout, recorded(config.sampling.draft, runtime.draft))
    todo = [index for index in mine if records.existing(index) is None]
    if not todo:
        return records
    if ranks.is_main_process:  # which writes the first shard, and so is here in any run
        note_target(folder, target, runtime.note, runtime.weights())
    writer, scorer = texts.writer(runtime), _scorer(config, plan, runtime, code)
    total, left = sum(map(len, mine.values())), sum(len(mine[index]) for index in todo)

    def take(record: Record, states: Tensor | None) -> None:
        if scorer is not None and states is not None:
            with runtime.stopwatch.part("reading"):
                scorer.take(record, states)

    with progress(total, "prompts", "records", initial=total - left) as bar, ThreadPoolExecutor(1, "shards") as disk:
        told = ToldTexts(bar, take)
        on_its_way: Future[ShardSummary] | None = None
        for index in todo:
            with runtime.stopwatch.part("writing"):
                part = writer.write(mine[index].start, mine[index].stop, told.ended)
            with runtime.stopwatch.part("reading"):
                if scorer is not None:
                    scorer.score(part)
                if on_its_way is not None:
                    on_its_way.result()
            on_its_way = disk.submit(records.write, index, part)  # while the target goes on
            told.shard(len(mine[index]), part, drafting_of(part, records.draft))
        if on_its_way is not None:
            on_its_way.result()
    if writer.dropped_turns:
        log.warning(
            "%d turns were left out: they do not fit into the target's context, or its chat template refuses what it "
            "answered before them",
            writer.dropped_turns,
        )
    return records


def _scorer(config: DistillConfig, plan: RecordingPlan, runtime: Runtime, code: FeatureCode | None) -> Scorer | None:
    """None where no text has to be read: the text alone is kept, or p came along with it."""
    if runtime.gives_p or not (plan.layout.store or plan.layout.features):
        return None
    layers = plan.layout.features.layers if plan.layout.features else ()
    return Scorer(runtime.passes(layers), plan.layout, config.seed, code)


CALL = 16
"""Prompts of a call for each row of an engine. It waits for the longest text of a call: with the 128 prompts of a shard
256 rows are never full. A killed run loses the call in hand."""


def calls(shards: Iterable[range], least: int) -> list[range]:
    """Shards that lie side by side, put together to as many prompts."""
    found: list[range] = []
    for shard in shards:
        if found and found[-1].stop == shard.start and len(found[-1]) < least:
            found[-1] = range(found[-1].start, shard.stop)
        else:
            found.append(shard)
    return found


def _write_responses(parts: Sequence[range], texts: Texts, runtime: Runtime) -> None:
    """Those of all shards, which the runtime keeps; what a killed run has written is there already."""
    writer = texts.writer(runtime)
    with progress(sum(map(len, parts)), "prompts", "responses") as bar:
        told = ToldTexts(bar)
        for part in parts:
            with runtime.stopwatch.part("writing"):
                writer.write(part.start, part.stop, told.ended)
            told.shard(len(part))


def _feature_code(
    config: DistillConfig,
    plan: RecordingPlan,
    texts: Texts,
    runtime: Runtime,
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
        with runtime.stopwatch.part("writing"):
            first = texts.writer(runtime).write(0, config.records.features.calibration_prompts)
        with runtime.stopwatch.part("reading"):
            write_atomically(file, calibrate(layout, first, runtime.passes(layout.layers)))
    ranks.wait_for_everyone()
    return load_code(layout, folder.path)


def _finish(
    config: DistillConfig,
    plan: RecordingPlan,
    target: ModelDescription,
    texts: Texts,
    runtime: Runtime,
    records: RecordWriter,
) -> None:
    p = "temperature 1, unwarped" if plan.layout.store else "none"
    about: dict[str, Any] = {"seed": config.seed, "p": p, **texts.provenance()}
    about["cut"] = None if plan.cut is None else plan.cut.model_dump()
    about["runtime"], about["spent"] = runtime.note.model_dump(), runtime.stopwatch.told()
    manifest = records.finish(plan.num_shards, target, noted_weights(records.run), about)
    for leftover in (FOLDER, "responses", "states"):  # what was kept until it was in the shards
        shutil.rmtree(records.run.path / leftover, ignore_errors=True)
    counts = manifest["counts"]
    log.info(
        "%s: %d records, %d tokens, %d of them learned, %d bytes (%.1f a token)",
        records.run.path,
        counts["records"],
        counts["tokens"],
        counts["learned_tokens"],
        counts["bytes"],
        counts["bytes"] / max(1, counts["tokens"]),
    )
    if plan.bad_rows:
        log.info("left out of the corpus: %s", plan.bad_rows.line())
    for one in manifest["drafting"]:
        log.info(
            "responses drafted by %s: %.2f tokens a pass of the target, which needs one pass a token alone (%d tokens)",
            *(one["draft"]["path"], one["tokens_per_pass"], one["tokens"]),
        )
    if plan.cut is not None and plan.cut.answers:
        log.warning("%s (docs/how-to/record_a_target.md, Answers that are cut)", plan.cut.line())
    if manifest["feature_errors"]:
        told = ", ".join(f"{layer}: {error:.2%}" for layer, error in manifest["feature_errors"].items())
        log.info("hidden states coded as %s, relative error of each layer: %s", config.records.features.code, told)
