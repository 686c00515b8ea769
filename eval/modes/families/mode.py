"""`mode=families`: record hidden states, train every draft, measure each, time the arms, then write the tables."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from decode import load_drafter
from decode.common.errors import ConfigError
from decode.common.progress import get_logger, progress
from decode.common.run_folder import RunFolder, is_finished
from decode.models.describe import ModelDescription, describe_model
from distill.records.record_folder import RecordFolder
from eval.config import EvalConfig
from eval.inputs import load, rough_seconds_per_token, say_sampling, shared_context
from eval.measure.cells import Results
from eval.modes.families.arms import (
    ArmFacts,
    check_layers,
    check_present,
    check_records,
    describe_arms,
    layers_wanted,
    record_folders,
)
from eval.modes.families.config import shape_settings
from eval.modes.families.engines import refusals, refused_forms, title
from eval.modes.families.measuring import Judge, KeptDraft, Timing, cells, points
from eval.modes.families.page import page_of
from eval.modes.families.results import MeasuredFamilies, make_results
from eval.modes.families.trainings import (
    NOT_TRAINED,
    Training,
    describe_given,
    given,
    in_children,
    pace_of,
    part_of,
    record_features,
    train_all,
    trainings,
)
from eval.prompts.chats import chat_tokenizer
from eval.prompts.held_out import file_prompts, split_prompts
from eval.prompts.prompt import DEEPEST_DRAFT, Prompt, check_room
from eval.render.files import write_files
from eval.render.formatting import count, guess
from eval.report_folder import planned_report
from eval.results.compared import Families

log = get_logger("eval")
_TOKENS_PER_S = 2000.0
"""Training tokens per second of a small draft on 2 cores, as an order of magnitude."""
_START_S = 4.0
"""Seconds that a training costs besides: opening records, one validation, export."""
_BATCH_GAIN = 6.0
"""How much faster than one by one the check of losslessness goes, in tokens per second."""
_EXTRA_CALLS = 4
"""Calls per arm that choosing draft lengths and warming up add to a cell, beside those of each length tried."""


def run(cfg: EvalConfig) -> None:
    """Compare draft families and write results.json, summary.md and index.html to cfg.output_dir; trainings and records
    with hidden states go to cfg.families.folder.

    Raises ConfigError and InputError before any weight is loaded. resume=auto keeps every training, measurement and
    cell that is finished.
    """
    _check(cfg)
    target = describe_model(cfg.target)
    say_sampling(cfg, target)
    source = check_records(cfg, target)
    arms = describe_arms(cfg, target)
    wanted = layers_wanted(cfg, arms)
    check_layers(cfg, wanted)
    facts = arms | describe_given(cfg, target)
    reported, screening = _prompts(cfg, target)
    with planned_report(cfg, plan_lines(cfg, target, facts, wanted, source)) as folder:
        if folder is None:
            return
        results, records = Results(folder), record_folders(cfg, wanted)
        if wanted:
            in_children(record_features, [(cfg, wanted)])
        parts = range(cfg.families.at_once)
        in_children(prepare, [(cfg, records, results, reported[: cfg.lossless.prompts], part) for part in parts])
        _race(cfg, results, facts, reported, screening)
        _write(folder, make_results(cfg, _measured(cfg, target, facts, wanted, results)))


def prepare(
    cfg: EvalConfig, records: Mapping[str, str], results: Results, prompts: Sequence[Prompt], part: int
) -> None:
    """Train and measure what is missing of one of families.at_once parts; given drafts belong to the first."""
    mine = part_of(cfg, part)
    train_all(cfg, records, mine)
    _judge(cfg, results, prompts, [*mine, *(given(cfg) if part == 0 else [])])


def _check(cfg: EvalConfig) -> None:
    if cfg.decode.verifier not in ("coupled", "greedy"):
        raise ConfigError(
            f"decode.verifier={cfg.decode.verifier} keeps the distribution, not the tokens, and mode=families "
            "compares tokens with plain decoding; use decode.verifier=coupled"
        )
    for temperature in cfg.temperatures:
        for name, settings in shape_settings(cfg.families, cfg.decode, temperature).items():
            if settings.confidence:
                raise ConfigError(
                    f"families.shapes.{name}.confidence=true is for DSpark heads, which predict what becomes of their "
                    "tokens, and a shape is for every family; leave it out"
                )
    check_present(cfg)


def _prompts(cfg: EvalConfig, target: ModelDescription) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts that are reported, of held-out text or of prompts.file, and others to choose draft lengths on."""
    families, tokenizer = cfg.families, chat_tokenizer(cfg)
    timed = [rows * number for rows, number in families.num_timed.items()]
    checked = max([cfg.lossless.prompts, *timed])
    screened = max(families.batch_sizes, default=0) * families.screening_batches
    reason = "lossless.prompts, or the largest batch times its count in families.batches_timed"
    reason_screened = "families.screening_batches of the largest of families.batch_sizes"
    if cfg.prompts.file is not None:
        found = file_prompts(cfg, tokenizer, checked + screened, f"{reason}, and {reason_screened}")
        screening, reported = found[:screened], found[screened:]
    else:
        reported = split_prompts(cfg, tokenizer, "heldout", checked, reason)
        screening = split_prompts(cfg, tokenizer, "validation", screened, reason_screened)
    longest = max(cfg.decode.max_new_tokens, cfg.lossless.tokens) + DEEPEST_DRAFT
    check_room([*reported, *screening], longest, shared_context(cfg, target))
    return reported, screening


def _judge(cfg: EvalConfig, results: Results, prompts: Sequence[Prompt], drafts: Sequence[Training]) -> None:
    """Measure every draft that is not measured yet, each kept as soon as it is."""
    missing = [one for one in drafts if results.read(_file(one)) is None]
    if not missing:
        return
    dtype = cfg.target.dtype if cfg.lossless.dtype == "auto" else cfg.lossless.dtype
    model, own = load(cfg, replace(cfg.target, dtype=dtype))
    judge = Judge.of(cfg, model, prompts)
    with progress(len(missing), "drafts", "tau and losslessness") as bar:
        for one in missing:
            began = time.perf_counter()
            drafter = own[one.arm] if one.budget == "given" else load_drafter(one.folder(cfg), target=model)
            measured = judge.measure(drafter, one.shapes(cfg))
            seconds = time.perf_counter() - began
            pace = None if one.budget == "given" else pace_of(one.folder(cfg))
            kept = KeptDraft(seed=one.seed, pace=pace, measured=measured, seconds=seconds)
            results.keep(_file(one), {**asdict(one), **kept.model_dump()})
            bar.update(1, done=one.name)


def _file(one: Training) -> str:
    return f"drafts/{one.name}.json"


def _race(
    cfg: EvalConfig,
    results: Results,
    facts: Mapping[str, ArmFacts],
    reported: Sequence[Prompt],
    screening: Sequence[Prompt],
) -> None:
    """Time the first seed's drafts at equal tokens, and those that are given."""
    if not any(True for _ in results.missing(cells(cfg))):
        return
    model, own = load(cfg, cfg.target)
    drafters = {arm: load_drafter(_timed(cfg, arm).folder(cfg), target=model) for arm in cfg.families.arms}
    Timing(cfg, model, drafters | own, facts, reported, screening).run(results)


def _measured(
    cfg: EvalConfig,
    target: ModelDescription,
    facts: Mapping[str, ArmFacts],
    wanted: Mapping[str, list[int]],
    results: Results,
) -> MeasuredFamilies:
    kept = {one: KeptDraft.model_validate(results.read(_file(one))) for one in (*trainings(cfg), *given(cfg))}
    timed: list[dict[str, Any]] = [results.cell(cell) or {} for cell in cells(cfg)]
    choices: list[dict[str, Any]] = [results.choice(point) or {} for point in points(cfg)]
    seconds = sum(one["seconds"] for one in [*timed, *choices])
    seconds += sum(one.seconds + (one.pace.seconds if one.pace else 0.0) for one in kept.values())
    drafts = {arm: str(_timed(cfg, arm).folder(cfg)) for arm in cfg.families.arms} | cfg.drafts
    refused = {arm: refusals(folder, target) for arm, folder in drafts.items()}
    return MeasuredFamilies(target, facts, record_folders(cfg, wanted), kept, timed, choices, seconds, refused)


def _timed(cfg: EvalConfig, arm: str) -> Training:
    """The arm's first seed at equal tokens, which is timed and asked about."""
    return Training(arm, "tokens", cfg.families.feature_codes[0], cfg.families.seeds[0])


def _write(folder: RunFolder, found: Families) -> None:
    content = found.model_dump(by_alias=True)
    write_files(folder, page_of(content))
    folder.finish({"drafts": len(found.trainings), "cells": len(found.cells)})
    log.info("report: %s", folder.file("index.html"))


def plan_lines(
    cfg: EvalConfig,
    target: ModelDescription,
    facts: Mapping[str, ArmFacts],
    wanted: Mapping[str, Sequence[int]],
    records: RecordFolder,
) -> list[str]:
    """For a person."""
    families, every = cfg.families, trainings(cfg)
    is_coded, temperatures = any(one.is_coded for one in every), ", ".join(f"{one:g}" for one in cfg.temperatures)
    missing = [one for one in every if not is_finished(one.folder(cfg))]
    seconds = _seconds(cfg, target, missing, wanted, records)
    names = [cell.name for cell in cells(cfg)]
    speeds = f"speed in {count(len(names), 'cell')} ({', '.join(names)})" if names else "no speeds"
    layers = "; ".join(f"{code} of layers {list(one)}" for code, one in wanted.items())
    return [
        f"target: {target.path}, {target.num_parameters:,} parameters; records: {families.records}, "
        f"{records.manifest.counts.tokens:,} tokens",
        f"records with hidden states: {layers or 'none, no arm reads recorded ones'}",
        "arms:",
        *(_arm_line(cfg, arm, one) for arm, one in facts.items()),
        *_engine_lines(cfg, facts),
        f"trainings: {len(every)}, {len(missing)} still to do: {count(len(families.arms), 'arm')} x "
        f"{count(len(families.seeds), 'seed')}, at {families.tokens:,} tokens"
        + (f" and at {families.seconds:g} s each" if families.seconds is not None else "")
        + (f"; {families.feature_arm} from {', '.join(families.feature_codes[1:])} too" if is_coded else ""),
        f"measured: tau of {', '.join(families.shapes)} at T {temperatures} on {cfg.lossless.prompts} "
        f"prompts; {speeds}",
        f"time: {guess(seconds)}",
    ]


def _arm_line(cfg: EvalConfig, arm: str, facts: ArmFacts) -> str:
    taps = f"reads target layers {list(facts.taps)}" if facts.taps else "reads tokens alone"
    made = " ".join(cfg.families.arms[arm]) if arm in cfg.families.arms else f"{NOT_TRAINED}: {cfg.drafts[arm]}"
    return f"  {arm}: {facts.num_parameters:,} parameters, {taps} ({made})"


def _engine_lines(cfg: EvalConfig, facts: Mapping[str, ArmFacts]) -> list[str]:
    """What is measured and not recommended, before an hour is spent on it."""
    engine = cfg.families.engine
    if engine is None:
        return []
    return [f"{arm} is not recommended for {title(engine)}: {why}" for arm, why in refused_forms(facts, engine).items()]


def _seconds(
    cfg: EvalConfig,
    target: ModelDescription,
    missing: Sequence[Training],
    wanted: Mapping[str, Sequence[int]],
    records: RecordFolder,
) -> float:
    per_token = rough_seconds_per_token(target, cfg.target.device)
    rescored = [folder for folder in set(record_folders(cfg, wanted).values()) if not is_finished(Path(folder))]
    reading = len(rescored) * records.manifest.counts.tokens * per_token / _BATCH_GAIN
    by_tokens = [one for one in missing if one.budget == "tokens"]
    training = len(by_tokens) * cfg.families.tokens / _TOKENS_PER_S + len(missing) * _START_S
    training += (len(missing) - len(by_tokens)) * (cfg.families.seconds or 0.0)
    passes = sum(len(one.shapes(cfg)) for one in (*missing, *given(cfg))) * len(cfg.temperatures)
    checking = passes * cfg.lossless.prompts * cfg.lossless.tokens * per_token / _BATCH_GAIN
    return reading + training + checking + _racing(cfg) * per_token


def _racing(cfg: EvalConfig) -> float:
    """Steps of the timed run, batches counted as one step."""
    arms, tried = len(cfg.families.arms) + len(cfg.drafts), max(1, len(cfg.timing.choose_k))
    steps = 0.0
    for cell in cells(cfg):
        calls = cfg.families.num_timed[cell.batch_size] * cfg.timing.rounds + _EXTRA_CALLS
        steps += (arms + 2) * calls * cfg.decode.max_new_tokens
        steps += arms * tried * (cfg.families.screening_batches + 1) * cfg.timing.screening_tokens
    return steps
