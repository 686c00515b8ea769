"""`mode=drafters`: target by target, cell by cell choose settings and time them, then write the page from what was
kept."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from decode import load_drafter
from decode.common.progress import get_logger
from decode.common.run_folder import RunFolder
from decode.drafters.untrained.early_exit import refuse_exit
from decode.models.load import load_model
from distill.engines.worker_process import check_python
from eval.arms.base import AUTOREGRESSIVE, EARLY_EXIT, LOOKUP, TRANSFORMERS
from eval.arms.ours import early_exit_settings
from eval.arms.vllm_engines import started
from eval.config import EvalConfig
from eval.inputs import rough_seconds_per_token
from eval.measure.cells import Cell, Results
from eval.modes.drafters.arms import Stock, cells, choose, engine_names, engine_settings, measure
from eval.modes.drafters.given_choices import Choices, given_choices
from eval.modes.drafters.page import render_page, render_summary
from eval.modes.drafters.results import make_results
from eval.modes.drafters.targets import Target, by_reason, describe_targets
from eval.prompts.chats import open_report
from eval.prompts.kinds import TextPrompts
from eval.render.files import write_files
from eval.render.formatting import duration, guess

_PER_ROW = 0.15
"""Seconds that one more row adds to a pass, as a share of those of one row."""
_DRAFTED = 2.5
"""Tokens of a pass that drafts, as an order of magnitude."""
log = get_logger("eval")
Texts = Mapping[str, TextPrompts]


def weight(cfg: EvalConfig, target: Target, cell: Cell) -> float:
    """Seconds of a cell over those of one token: what is timed, and the warm-up and trial of every setting."""
    lengths = sum(len(way.lengths) for way in target.ways(cfg, cell.text))
    tried, timed = (0 if cfg.drafters.choices else lengths), len(target.ways(cfg, cell.text))
    choosing = tried * (1 + cfg.drafters.batches_screened(cell.batch_size)) * cfg.timing.screening_tokens / _DRAFTED
    calls = 1 + cfg.timing.rounds * cfg.drafters.num_timed[cell.batch_size]
    arms = timed / _DRAFTED + 3 + len(engine_names(cfg))  # transformers generate takes twice as long as our loop
    return (choosing + arms * calls * cfg.decode.max_new_tokens) * (1 + _PER_ROW * (cell.batch_size - 1))


def _seconds(cfg: EvalConfig, targets: Sequence[Target]) -> float:
    """As `rough_seconds_per_token` has it."""
    return sum(
        weight(cfg, target, cell) * rough_seconds_per_token(target.description, cfg.target.device)
        for target in targets
        for cell in cells(cfg, [target])
    )


def plan_lines(cfg: EvalConfig, targets: Sequence[Target]) -> list[str]:
    """For a person."""
    every = cells(cfg, targets)
    peers = [AUTOREGRESSIVE, TRANSFORMERS, *engine_names(cfg)]
    batches = ", ".join(f"{count} of {rows}" for rows, count in cfg.drafters.num_timed.items())
    tried = f"tried on {cfg.drafters.screening_prompts} prompts or a batch, {cfg.timing.screening_tokens} new tokens"
    return [
        f"cells: {len(every)} ({', '.join(cell.name for cell in every)})",
        *(f"{one.key}={one.description.path} writes {', '.join(one.texts)}" for one in targets),
        *(
            f"arms for {text}: {', '.join(way.name for way in one.ways(cfg, text)) or 'none'}"
            for one in targets
            for text in one.texts
        ),
        *(
            f"left out for {text}: {by_reason(reasons)}"
            for one in targets
            for text in one.texts
            if (reasons := one.left_out(cfg, text))
        ),
        f"settings: as chosen in {cfg.drafters.choices}" if cfg.drafters.choices else f"draft lengths: {tried}",
        f"beside them: {', '.join(peers)}; one prompt at a time also {LOOKUP} (best of "
        f"{len(cfg.peers.prompt_lookup_num_tokens)})"
        + (f", {EARLY_EXIT} (best of {len(early_exit_settings(cfg.peers))})" if cfg.peers.early_exit_layers else ""),
        f"batches of prompts timed per cell: {batches}; {cfg.decode.max_new_tokens} new tokens each, "
        f"{cfg.timing.rounds} rounds",
        f"time: {guess(_seconds(cfg, targets))}, compiling not counted",
    ]


def run(cfg: EvalConfig) -> None:
    """Compare ways to draft and write results.json, summary.md and index.html to cfg.output_dir.

    Raises ConfigError and InputError before any weight is loaded. resume=auto keeps every cell that is finished: arms
    are compared within a cell only.
    """
    if cfg.peers.vllm_python is not None:
        check_python(cfg.peers.vllm_python, "peers.vllm_python", "leave out peers=vllm")
    targets = describe_targets(cfg)
    for one in targets:
        for layers in cfg.peers.early_exit_layers:
            refuse_exit(layers, one.description.num_layers, one.description.path)
    given = given_choices(cfg, targets)
    texts = {target.key: target.prompts(cfg) for target in targets}
    if cfg.plan:
        sys.stdout.write("\n".join(plan_lines(cfg, targets)) + "\n")
        return
    with open_report(cfg) as folder:
        if folder.is_finished:
            return
        for line in plan_lines(cfg, targets):
            log.info(line)
        results = Results(folder)
        for target in targets:
            if any(True for _ in results.missing(cells(cfg, [target]))):
                _measure_target(cfg, target, folder, texts[target.key], results, given)
        every = [results.cell(cell) or {} for cell in cells(cfg, targets)]
        chosen = [results.choice(cell) or {} for cell in cells(cfg, targets)]
        prompts = {text: found for each in texts.values() for text, found in each.items()}
        _write(folder, make_results(cfg, targets, prompts, every, chosen))


def _measure_target(
    cfg: EvalConfig, target: Target, folder: RunFolder, texts: Texts, results: Results, given: Choices
) -> None:
    """All of a target, whose models are gone when the next one's are loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with _stock(cfg, target, folder, texts, given) as stock:
        _measure(stock, results, given)


@contextmanager
def _stock(cfg: EvalConfig, target: Target, folder: RunFolder, texts: Texts, given: Choices) -> Iterator[Stock]:
    """One target, its drafters and its engines, held for all of its cells."""
    max_length = max(prompts.longest for prompts in texts.values()) + cfg.decode.max_new_tokens
    model = load_model(target.source)
    wanted = {way.name: way for text in target.texts for way in target.ways(cfg, text)}
    drafters = {name: load_drafter(way.draft, target=model, **way.settings) for name, way in wanted.items()}
    first_lines = engine_settings(cfg, target, max_length, str(model.dtype).removeprefix("torch."), given)
    with started(cfg.peers.vllm_python, first_lines, folder) as engines:
        yield Stock(cfg, target, model, drafters, engines, texts)


def _measure(stock: Stock, results: Results, given: Choices) -> None:
    """Every cell of the target that is missing, settings first, each kept as soon as it is done."""
    missing, began = list(results.missing(cells(stock.cfg, [stock.target]))), time.perf_counter()
    for number, cell in enumerate(missing):
        choice = results.choice(cell)
        if choice is None:
            choice = given.get(cell) or choose(stock, cell)
            results.keep_choice(cell, choice)
        results.keep_cell(cell, measure(stock, cell, choice))
        _say_progress(stock, missing, number + 1, time.perf_counter() - began)


def _say_progress(stock: Stock, missing: Sequence[Cell], done: int, seconds: float) -> None:
    parts = (missing[:done], missing[done:])
    spent, ahead = (sum(weight(stock.cfg, stock.target, cell) for cell in part) for part in parts)
    left, target = duration(seconds / spent * ahead), stock.target.key
    log.info("cell %d of %d done (%s); about %s left of %s", done, len(missing), missing[done - 1].name, left, target)


def _write(folder: RunFolder, results: dict[str, Any]) -> None:
    write_files(folder, results, render_summary(results), render_page(results))
    folder.finish({"cells": len(results["cells"])})
    log.info("report: %s", folder.file("index.html"))
