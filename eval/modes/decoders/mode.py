"""`mode=decoders`: choose settings point by point, time cell by cell, then write the page from what was kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from decode.common.errors import ConfigError
from decode.common.progress import get_logger
from decode.common.run_folder import RunFolder
from decode.drafters.beside.refusals import check_overlap, presumed_family
from decode.drafters.untrained.config import UNTRAINED, check_strict, check_tree
from decode.models.load import ModelDescription
from distill.engines.worker_process import check_python
from eval.arms.base import ASSISTED, AUTOREGRESSIVE, LOOKUP, STATIC, TRANSFORMERS
from eval.arms.transformers_arms import assisted_settings, no_compiler
from eval.arms.vllm_engines import started
from eval.comparison_config import arm_settings
from eval.config import EvalConfig
from eval.inputs import check_models, load, rough_seconds_per_token, shared_context
from eval.measure.cells import Cell, Results
from eval.modes.decoders.arms import (
    Stock,
    arms_of,
    cells,
    choose,
    engine_names,
    engine_settings,
    left_out,
    measure,
    points,
    warm,
)
from eval.modes.decoders.given_choices import Choices, given_choices
from eval.modes.decoders.page import render_page, render_summary
from eval.modes.decoders.results import make_results
from eval.prompts.chats import chat_tokenizer, open_report
from eval.prompts.kinds import TextPrompts, corpus_prompts, file_prompts
from eval.prompts.prompt import DEEPEST_DRAFT, Prompt, check_room
from eval.render.files import write_files
from eval.render.formatting import duration, guess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.corpora.corpus import Split

_EXTRA_CALLS = 8
"""Calls per arm that choosing settings and warming up add to a cell."""
_PER_ROW = 0.07
"""Seconds that one more row adds to a pass, as a share of those of one row."""
_ASKED_BY = "the largest batch times its count in decoders.batches_timed, or times decoders.screening_batches, or "
_ASKED_BY += "decoders.screening_prompts"
log = get_logger("eval")


def weight(cfg: EvalConfig, cell: Cell) -> float:
    """What a cell costs beside the others: its calls, each the slower the more rows it has."""
    return (cfg.decoders.num_timed[cell.batch_size] + _EXTRA_CALLS) * (1 + _PER_ROW * (cell.batch_size - 1))


def _seconds(cfg: EvalConfig, target: ModelDescription) -> float:
    """As `rough_seconds_per_token` has it."""
    arms = 6 + len(cfg.decoders.fixed) + len(engine_names(cfg))
    calls = arms * cfg.timing.rounds * sum(weight(cfg, cell) for cell in cells(cfg))
    return calls * cfg.decode.max_new_tokens * rough_seconds_per_token(target, cfg.target.device)


def plan_lines(cfg: EvalConfig, target: ModelDescription) -> list[str]:
    """For a person."""
    tried = {temperature: arm_settings(cfg.decoders, cfg.decode, temperature) for temperature in cfg.temperatures}
    choosing = [
        f"settings of ours tried at T={temperature:g}: {', '.join(names)}" for temperature, names in tried.items()
    ]
    every = cells(cfg)
    peers = [TRANSFORMERS, STATIC, *engine_names(cfg)]
    batches = ", ".join(f"{count} of {rows}" for rows, count in cfg.decoders.num_timed.items())
    static = no_compiler()
    return [
        f"cells: {len(every)} ({', '.join(cell.name for cell in every)})",
        *([f"settings: as chosen in {cfg.decoders.choices}"] if cfg.decoders.choices else choosing),
        f"timed in each cell: {AUTOREGRESSIVE}, the best setting and the best plain chain, "
        f"{', '.join(cfg.decoders.fixed) or 'no others'}",
        f"peers: {', '.join(peers)}; one prompt at a time also {ASSISTED} (best of {len(assisted_settings(cfg.peers))} "
        f"settings) and {LOOKUP} (best of {len(cfg.peers.prompt_lookup_num_tokens)})",
        *([f"{STATIC} is left out: {static}"] if static else []),
        f"batches of prompts timed per cell: {batches}; {cfg.decode.max_new_tokens} new tokens each, "
        f"{cfg.timing.rounds} rounds",
        f"time: {guess(_seconds(cfg, target))}, compiling not counted",
    ]


def run(cfg: EvalConfig) -> None:
    """Compare decoders and write results.json, summary.md and index.html to cfg.output_dir.

    Raises ConfigError and InputError before any weight is loaded. resume=auto keeps every cell that is finished:
    arms are compared within a cell only.
    """
    _check(cfg)
    target, families = check_models(cfg)
    given = given_choices(cfg)
    texts = load_texts(cfg, chat_tokenizer(cfg), shared_context(cfg, target))
    if cfg.plan:
        sys.stdout.write("\n".join(plan_lines(cfg, target)) + "\n")
        return
    with open_report(cfg) as folder:
        if folder.is_finished:
            return
        for line in plan_lines(cfg, target):
            log.info(line)
        results = Results(folder)
        if any(True for _ in results.missing(cells(cfg))):
            with _stock(cfg, folder, texts, next(iter(families.values()))) as stock:
                _measure(stock, results, texts, given)
        every = [results.cell(cell) or {} for cell in cells(cfg)]
        chosen = [results.choice(point) or {} for point in points(cfg)]
        dtype = every[0]["rows"][0]["dtype"]
        _write(folder, make_results(cfg, target, dtype, every, chosen))


def _check(cfg: EvalConfig) -> None:
    for temperature in cfg.temperatures:
        arm_settings(cfg.decoders, cfg.decode, temperature)
    draft = next(iter(cfg.drafts.values()), None)
    for name, changes in cfg.decoders.arms.items():
        check_tree(draft, changes.get("tree", cfg.decode.tree), f"decoders.arms.{name}.tree")
        check_strict(draft, {}, changes.get("strict", cfg.decode.strict), f"decoders.arms.{name}.strict")
        overlap = changes.get("overlap", cfg.decode.overlap)
        check_overlap(presumed_family(draft), overlap, f"decoders.arms.{name}.overlap")
    if cfg.peers.vllm_python is not None and cfg.peers.vllm_draft_tokens and draft in UNTRAINED:
        raise ConfigError(
            f"peers.vllm_draft_tokens={cfg.peers.vllm_draft_tokens} has vLLM draft with {draft}, which is no folder "
            "that it loads. Use peers.vllm_draft_tokens=[]"
        )
    if cfg.peers.vllm_python is not None:
        check_python(cfg.peers.vllm_python, "peers.vllm_python", "leave out peers=vllm")


def load_texts(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> dict[str, TextPrompts]:
    """Kind of text -> prompts. ConfigError where the corpus gives too few, InputError where one is too long."""
    sizes = cfg.decoders.num_timed
    reported = max(rows * count for rows, count in sizes.items())
    screening = max(rows * cfg.decoders.batches_screened(rows) for rows in sizes)
    if cfg.prompts.file is not None:
        found = file_prompts(cfg, tokenizer, reported, screening, _ASKED_BY)
    else:
        found = {
            kind: TextPrompts(
                _prompts(cfg, tokenizer, kind, "heldout", reported),
                _prompts(cfg, tokenizer, kind, "validation", screening),
            )
            for kind in cfg.decoders.texts
        }
    for prompts in found.values():
        check_room([*prompts.reported, *prompts.screening], cfg.decode.max_new_tokens + DEEPEST_DRAFT, max_positions)
    return found


def _prompts(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, kind: str, split: Split, wanted: int) -> list[Prompt]:
    remedy = "leave this text out of decoders.texts"
    return corpus_prompts(cfg, tokenizer, kind == "prose", split, wanted, _ASKED_BY, remedy)


@contextmanager
def _stock(cfg: EvalConfig, folder: RunFolder, texts: Mapping[str, TextPrompts], family: str) -> Iterator[Stock]:
    """Models and engines, held for all cells."""
    max_length = max(prompts.longest for prompts in texts.values()) + cfg.decode.max_new_tokens
    model, drafters = load(cfg, cfg.target)
    dtype = str(model.dtype).removeprefix("torch.")
    with started(cfg.peers.vllm_python, engine_settings(cfg, max_length, dtype), folder) as engines:
        yield Stock(cfg, model, next(iter(drafters.values())), family, engines, max_length)


def _measure(stock: Stock, results: Results, texts: Mapping[str, TextPrompts], given: Choices) -> None:
    """Every cell that is missing, settings first, each kept as soon as it is done."""
    missing = list(results.missing(cells(stock.cfg)))
    began, broken = time.perf_counter(), dict[str, str]()
    for number, cell in enumerate(missing):
        choice = results.choice(cell.point)
        if choice is None:
            choice = given.get(cell.point) or choose(stock, cell.point, texts)
            results.keep_choice(cell.point, choice)
        if cell.point not in [before.point for before in missing[:number]]:
            broken |= _warm(stock, cell, choice, texts, broken)
        reasons = left_out(cell, stock, broken)
        results.keep_cell(cell, measure(stock, cell, choice, texts, reasons))
        _say_progress(stock.cfg, missing, number + 1, time.perf_counter() - began)


def _warm(
    stock: Stock, cell: Cell, choice: Mapping[str, Any], texts: Mapping[str, TextPrompts], broken: Mapping[str, str]
) -> dict[str, str]:
    arms = arms_of(stock, cell, choice, list(left_out(cell, stock, broken)))
    return warm(arms, texts[cell.text].screening, cell, stock)


def _say_progress(cfg: EvalConfig, missing: Sequence[Cell], done: int, seconds: float) -> None:
    spent, ahead = (sum(weight(cfg, cell) for cell in part) for part in (missing[:done], missing[done:]))
    left = duration(seconds / spent * ahead)
    log.info("cell %d of %d done (%s); about %s left", done, len(missing), missing[done - 1].name, left)


def _write(folder: RunFolder, results: dict[str, Any]) -> None:
    write_files(folder, results, render_summary(results), render_page(results))
    folder.finish({"cells": len(results["cells"])})
    log.info("report: %s", folder.file("index.html"))
