"""The distill stage: validate, plan, load the target, then shard by shard sample responses, score them, write them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from decode.house.errors import InputError
from decode.house.progress import get_logger, progress
from decode.house.run_folder import RunFolder, free_disk_check, open_run, read_json, write_json
from decode.models import ModelDescription, describe_model, load_model
from distill.config import DistillConfig
from distill.corpora import load_corpus
from distill.plan import Plan, make_plan
from distill.prompts import Prompt, collect_prompts, digest
from distill.records import RecordWriter
from distill.responses import Writer, target_sampler
from distill.score import Scorer
from distill.show import examples, write_lines

SLOWEST_RANK = timedelta(days=7)  # the first rank to finish waits for the last one this long

log = get_logger("distill")


def run(config: DistillConfig) -> None:
    """Write a record folder. Raises ConfigError and InputError before any weight is loaded."""
    target = describe_model(config.target)
    # without cpu=True every rank on a machine without an accelerator believes that it is alone, and writes every shard
    ranks = PartialState(cpu=not torch.accelerator.is_available(), timeout=SLOWEST_RANK)
    folder = None if config.plan or not Path(config.output_dir).exists() else _open(config, ranks)
    if folder is not None and folder.is_finished:
        log.info("%s is already finished", folder.path)
        return
    tokenizer = _tokenizer(target)
    log.info("reading prompts from %s", load_corpus(config.data).where)
    prompts = collect_prompts(load_corpus(config.data), tokenizer, config)
    plan = make_plan(prompts, tokenizer, target, config)
    if ranks.is_main_process:
        write_lines([*examples(prompts, tokenizer, config), *(plan.lines() if config.plan else [])])
    if config.plan:
        return
    free_disk_check(config.output_dir, plan.bytes_on_disk)
    folder = folder or _open(config, ranks)
    _check_same_prompts(folder, prompts, ranks)
    _write_shards(config, plan, target, tokenizer, prompts, folder, ranks)


def _open(config: DistillConfig, ranks: PartialState) -> RunFolder:
    folder = open_run(config.output_dir, "distill", config, config.resume, ranks.is_main_process)
    ranks.wait_for_everyone()  # the others write into the folder, which has to be rank 0's to start
    return folder


def _tokenizer(target: ModelDescription) -> PreTrainedTokenizerBase:
    if target.tokenizer is None:
        raise InputError(
            f"target.path={target.path} holds no tokenizer files, and prompts are text; add them to the folder"
        )
    if len(target.tokenizer) > target.vocab_size:
        raise InputError(
            f"the tokenizer of {target.path} has {len(target.tokenizer)} entries, and the model only "
            f"{target.vocab_size}: some tokens would have no embedding. Use the tokenizer that the model was trained "
            "with"
        )
    return target.tokenizer


def _check_same_prompts(folder: RunFolder, prompts: Sequence[Prompt], ranks: PartialState) -> None:
    """Bind the folder to these prompts, so that a corpus that changed since a run was killed is not mixed into it."""
    note, now = folder.file("prompts.json"), digest(prompts)
    if note.is_file():
        before = read_json(note)["sha256"]
        if before != now:
            raise InputError(
                f"the prompts of {folder.path} had SHA-256 {before}, and now have {now}: the corpus or the tokenizer "
                "changed since that run started, and its records would be mixed. Use another output_dir"
            )
    elif ranks.is_main_process:
        write_json(note, {"sha256": now, "prompts": len(prompts)})


def _write_shards(
    config: DistillConfig,
    plan: Plan,
    target: ModelDescription,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    folder: RunFolder,
    ranks: PartialState,
) -> None:
    records = RecordWriter(folder, plan.layout)
    size = plan.shard_size
    mine = range(ranks.process_index, plan.num_shards, ranks.num_processes)
    todo = [index for index in mine if records.existing(index) is None]
    if todo:
        log.info("loading %s", target.path)
        model = load_model(config.target)
        sampler = target_sampler(model, config.sampling, config.batch_size) if config.responses == "target" else None
        writer = Writer(config, tokenizer, sampler, target.max_positions)
        scorer = Scorer(model, plan.layout, config.seed, config.batch_size)
        total = sum(len(prompts[index * size : (index + 1) * size]) for index in mine)
        left = sum(len(prompts[index * size : (index + 1) * size]) for index in todo)
        with progress(total, "prompts", "records", initial=total - left) as bar:
            began, tokens = time.perf_counter(), 0
            for index in todo:
                part = prompts[index * size : (index + 1) * size]
                texts = writer.write(part)
                scorer.score(texts)
                tokens += records.write(index, texts)["learned_tokens"]
                bar.update(len(part), tokens_per_s=round(tokens / (time.perf_counter() - began)))
        if writer.dropped_turns:
            log.warning("%d turns were left out: they do not fit into the target's context", writer.dropped_turns)
    ranks.wait_for_everyone()
    if ranks.is_main_process:
        _finish(config, plan, target, prompts, records)


def _finish(
    config: DistillConfig, plan: Plan, target: ModelDescription, prompts: Sequence[Prompt], records: RecordWriter
) -> None:
    manifest = records.finish(plan.num_shards, target, _provenance(config, prompts))
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


def _provenance(config: DistillConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    return {
        "config": asdict(config),
        "seed": config.seed,
        "responses": config.responses,
        "sampling": asdict(config.sampling),
        "p": "temperature 1, unwarped",
        "prompts_sha256": digest(prompts),
    }
