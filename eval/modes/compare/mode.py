"""`mode=decoders` and `mode=drafters`: target by target, cell by cell choose settings and time them, then write the
page from what was kept."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from decode import load_drafter
from decode.common.errors import InputError
from decode.common.progress import get_logger
from decode.common.run_folder import RunFolder
from decode.models.load import load_model
from distill.engines.worker_process import check_python
from eval.arms.vllm_engines import started, worker_settings
from eval.config import EvalConfig
from eval.inputs import rough_seconds_per_token
from eval.measure.cells import Cell, CellRun, Results
from eval.measure.timed_run import sharing_captures
from eval.modes.compare.arm_set import ArmSet, Choices, Loaded, Target
from eval.modes.compare.decoders import Decoders, LoadedDecoders
from eval.modes.compare.drafters import Drafters, LoadedDrafters
from eval.modes.compare.page import page_of
from eval.modes.compare.results import make_results
from eval.modes.compare.texts import load_texts
from eval.prompts.kinds import TextPrompts
from eval.render.files import write_files
from eval.render.formatting import duration, guess
from eval.report_folder import planned_report
from eval.results.compared import Choice
from eval.results.comparisons import about, check_same_comparison
from eval.results.schema import read_results

ARM_SETS: dict[str, tuple[type[ArmSet], Callable[..., Loaded]]] = {
    "decoders": (Decoders, LoadedDecoders),
    "drafters": (Drafters, LoadedDrafters),
}
"""Mode -> what it compares, and what that is once its target is loaded."""
log = get_logger("eval")
Texts = Mapping[str, TextPrompts]


def run(cfg: EvalConfig) -> None:
    """Compare what the mode names and write results.json, summary.md and index.html to cfg.output_dir.

    Raises ConfigError and InputError before any weight is loaded. resume=auto keeps every cell that is finished: arms
    are compared within a cell only.
    """
    if cfg.peers.vllm_python is not None:
        check_python(cfg.peers.vllm_python, "peers.vllm_python", "leave out peers=vllm")
    arm_set = ARM_SETS[cfg.mode][0](cfg)
    targets = arm_set.targets()
    given = given_choices(arm_set, targets)
    texts = {target.key: load_texts(arm_set, target) for target in targets}
    with planned_report(cfg, plan_lines(arm_set, targets)) as folder:
        if folder is None:
            return
        kept = Results(folder)
        for target in targets:
            if any(True for _ in kept.missing(arm_set.cells([target]))):
                with _load(arm_set, target, folder, texts[target.key], given) as loaded:
                    _measure(loaded, kept, given)
        every = [kept.cell(cell) or {} for cell in arm_set.cells(targets)]
        chosen = [kept.choice(place) or {} for place in arm_set.places(targets)]
        by_kind = {text: prompts for each in texts.values() for text, prompts in each.items()}
        results = make_results(arm_set, targets, by_kind, every, chosen)
        write_files(folder, page_of(results))
        folder.finish({"cells": len(every)})
        log.info("report: %s", folder.file("index.html"))


def plan_lines(arm_set: ArmSet, targets: Sequence[Target]) -> list[str]:
    """For a person."""
    cfg, every = arm_set.cfg, arm_set.cells(targets)
    batches = ", ".join(f"{count} of {rows}" for rows, count in arm_set.sizes.num_timed.items())
    seconds = sum(
        arm_set.tokens(target, cell) * rough_seconds_per_token(target.description, cfg.target.device)
        for target in targets
        for cell in arm_set.cells([target])
    )
    return [
        f"cells: {len(every)} ({', '.join(cell.name for cell in every)})",
        *arm_set.plan(targets),
        f"batches of prompts timed per cell: {batches}; {cfg.decode.max_new_tokens} new tokens each, "
        f"{cfg.timing.rounds} rounds",
        f"time: {guess(seconds)}, compiling not counted",
    ]


def given_choices(arm_set: ArmSet, targets: Sequence[Target]) -> Choices:
    """What MODE.choices holds, {} where it is null; InputError where that run tried other settings, or is of other
    targets or drafts, or lacks a cell, an arm or a setting of this one."""
    if arm_set.sizes.choices is None:
        return {}
    mode, file = arm_set.cfg.mode, Path(arm_set.sizes.choices)
    anew = f"or choose anew with {mode}.choices=null"
    results = read_results(file)
    paths = {text: target.description.path for target in targets for text in target.texts}
    there = dict.fromkeys(paths, results["target"].get("path"))  # which writes all texts where no others are named
    if "targets" in results:
        there = {text: one["path"] for one in results["targets"] for text in one["texts"]}
    known = {**results, "targets": {text: there.get(text) for text in paths}}
    check_same_comparison(f"{mode}.choices", file, known, {"mode": mode, "targets": paths, **arm_set.in_words()})
    found = {about(one): one for one in results["choices"]}
    missing = [place.name for place in arm_set.places(targets) if about(asdict(place)) not in found]
    if missing:
        raise InputError(
            f"{mode}.choices={file} chose nothing for {', '.join(missing)}, which this run times. Leave these out of "
            f"{mode}.batch_sizes, {mode}.texts and temperatures, {anew}"
        )
    for target in targets:
        for place in arm_set.places([target]):
            best = found[about(asdict(place))]["best"]
            for arm, settings in arm_set.tried(target, place, best).items():
                if best.get(arm) not in settings:
                    raise InputError(
                        f"{mode}.choices={file} has {arm} at {best.get(arm)} for {place.name}, and this run tries "
                        f"{', '.join(settings) or 'nothing'}. Give the arms and peers of that run, {anew}"
                    )
    own = {"seconds": 0.0, "chosen_in": str(file)}
    return {place: {**found[about(asdict(place))], **own} for place in arm_set.places(targets)}


@contextmanager
def _load(arm_set: ArmSet, target: Target, folder: RunFolder, texts: Texts, given: Choices) -> Iterator[Loaded]:
    """All of a target, held for all of its cells, after the models of the one before are gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    cfg, model = arm_set.cfg, load_model(target.source)
    named = arm_set.drafters(target).items()
    drafters = {name: load_drafter(path, target=model, **settings) for name, (path, settings) in named}
    chosen = [given[one]["best"].get(arm_set.vllm_drafting) for one in arm_set.places([target]) if one in given]
    max_length = max(prompts.longest for prompts in texts.values()) + cfg.decode.max_new_tokens
    about = (str(target.source.path), str(model.dtype).removeprefix("torch."), max_length)
    about = (*about, max(arm_set.sizes.batch_sizes), cfg.seed)
    first_lines = {
        name: worker_settings(*about, None if k is None else arm_set.speculation(k))
        for name, k in arm_set.engines(chosen).items()
    }
    with started(cfg.peers.vllm_python, first_lines, folder) as engines:
        yield ARM_SETS[cfg.mode][1](arm_set, target, model, drafters, engines, texts)


def _measure(loaded: Loaded, kept: Results, given: Choices) -> None:
    """Every cell of the target that is missing, settings first, each kept as soon as it is done."""
    arm_set, target = loaded.arm_set, loaded.target
    missing, began = list(kept.missing(arm_set.cells([target]))), time.perf_counter()
    longest = max(prompts.longest for prompts in loaded.texts.values()) + loaded.cfg.decode.max_new_tokens
    for number, cell in enumerate(missing, start=1):
        place = arm_set.place(cell)
        choice = kept.choice(place)
        with sharing_captures(longest, cell.batch_size):
            if choice is None:
                choice = dict(given.get(place) or loaded.choose(cell))
                kept.keep_choice(place, choice)
            kept.keep_cell(cell, measure(loaded, cell, Choice.model_validate(choice)))
        parts = (missing[:number], missing[number:])
        spent, ahead = (sum(arm_set.tokens(target, one) for one in part) for part in parts)
        left = duration((time.perf_counter() - began) / spent * ahead)
        log.info("cell %d of %d done (%s); about %s left of %s", number, len(missing), cell.name, left, target.key)


def measure(loaded: Loaded, cell: Cell, choice: Choice) -> dict[str, Any]:
    """The cell's content for results.json."""
    count = loaded.arm_set.sizes.num_timed[cell.batch_size]
    prompts = loaded.texts[cell.text].reported[: cell.batch_size * count]
    arms, drafted = loaded.warm_arms(cell, choice), list(loaded.drafted(cell, choice))
    content = CellRun(loaded.cfg, loaded.model, loaded.drafts_timed_alone).time(cell, arms, drafted, prompts)
    version = loaded.engines.version
    return {**content, **loaded.facts(choice), "left_out": loaded.left_out(cell), "vllm_version": version}
