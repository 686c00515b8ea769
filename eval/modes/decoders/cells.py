"""The cells of the comparison: which settings are chosen where, which arms run, and what is kept of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.arms.base import ASSISTED, STATIC, Arm
from eval.arms.ours import renamed
from eval.arms.transformers_arms import no_compiler
from eval.config import EvalConfig
from eval.measure.cells import Cell, CellRun, Point
from eval.measure.cells import choose as fastest_settings
from eval.measure.component_times import is_plain_chain
from eval.measure.timed_run import fastest, warm_up
from eval.modes.decoders.arms import LOOKUP, Stock, our_name
from eval.modes.decoders.texts import TextPrompts
from eval.prompts.held_out import Prompt
from eval.results.figures import Drafted


def points(cfg: EvalConfig) -> list[Point]:
    """Batch size outermost: passes captured and compiled for its shapes serve all of its cells."""
    return [Point(rows, temperature) for rows in cfg.decoders.batch_sizes for temperature in cfg.temperatures]


def cells(cfg: EvalConfig) -> list[Cell]:
    """All cells in the order of the run."""
    return [Cell(one.batch_size, one.temperature, text) for one in points(cfg) for text in cfg.decoders.texts]


OURS = "ours"


def candidates(stock: Stock, point: Point) -> dict[str, dict[str, Arm]]:
    """Family -> setting -> arm. transformers drafts for one prompt at a time, so beyond batch 1 only ours are tried."""
    families = {OURS: stock.ours(point.temperature)}
    if point.batch_size == 1:
        families |= {ASSISTED: stock.assisted(point.temperature), LOOKUP: stock.lookup(point.temperature)}
    return {family: arms for family, arms in families.items() if arms}


def choose(stock: Stock, point: Point, texts: Mapping[str, TextPrompts]) -> dict[str, Any]:
    """{"best": family -> setting, "best_chain": setting, "tokens_per_s": family -> setting -> speed}."""
    tried = fastest_settings(stock.cfg, point, candidates(stock, point), _screening_prompts(stock.cfg, point, texts))
    chains = [name for name, one in stock.settings(point.temperature).items() if is_plain_chain(one)]
    speeds = tried["tokens_per_s"][OURS]
    return {**tried, "best_chain": fastest({name: speeds[name] for name in chains}) if chains else None}


def _screening_prompts(cfg: EvalConfig, point: Point, texts: Mapping[str, TextPrompts]) -> list[Prompt]:
    each = point.batch_size * cfg.decoders.screening_batches
    return [prompt for prompts in texts.values() for prompt in prompts.screening[:each]]


_WARM_UPS = 2
"""Runs of every arm before its first cell; a pass is captured after some uses of its shape."""


def timed_settings(stock: Stock, cell: Cell, choice: Mapping[str, Any]) -> list[str]:
    """Our settings timed in a cell: the best one, the best plain chain, and the fixed ones."""
    known = stock.settings(cell.temperature)
    chosen = [choice["best"][OURS], choice["best_chain"], *stock.cfg.decoders.fixed]
    return list(dict.fromkeys(name for name in chosen if name in known))


def arms_of(stock: Stock, cell: Cell, choice: Mapping[str, Any], without: Sequence[str]) -> list[Arm]:
    """All arms of a cell, those named in `without` left out."""
    temperature = cell.temperature
    arms = [*stock.plain(temperature), *stock.ours(temperature, timed_settings(stock, cell, choice)).values()]
    if cell.batch_size in stock.cfg.decoders.static_batches:
        arms.append(stock.static(temperature))
    families = {ASSISTED: stock.assisted(temperature), LOOKUP: stock.lookup(temperature)}
    for family, settings in families.items():
        if family in choice["best"]:
            arms.append(renamed(settings[choice["best"][family]], family))
    return [arm for arm in [*arms, *stock.vllm(temperature)] if arm.name not in without]


def left_out(cell: Cell, stock: Stock, broken: Mapping[str, str]) -> dict[str, str]:
    """Arm -> why it does not run in this cell."""
    reasons = dict(broken)
    if (reason := no_compiler()) is not None:
        reasons[STATIC] = reason
    if cell.batch_size > 1:
        for peer in (ASSISTED, LOOKUP):
            reasons[peer] = f"transformers drafts for one prompt at a time, not {cell.batch_size}"
    elif not stock.assisted(cell.temperature):
        reasons[ASSISTED] = "no setting of it is configured, or the draft is no language model"
    return reasons


def warm(arms: Sequence[Arm], prompts: Sequence[Prompt], cell: Cell, stock: Stock) -> dict[str, str]:
    """Run every arm unmeasured. Returns arm -> reason where transformers' compiled forward raises: it is left out."""
    cfg, broken = stock.cfg, {}
    for arm in arms:
        try:
            for _ in range(_WARM_UPS):
                warm_up([arm], prompts, cell.batch_size, cfg.seed, cfg.decode.max_new_tokens)
        except RuntimeError as error:
            if arm.name != STATIC:
                raise
            broken[arm.name] = f"compiling failed: {str(error).splitlines()[0]}"
    return broken


def measure(
    stock: Stock, cell: Cell, choice: Mapping[str, Any], texts: Mapping[str, TextPrompts], reasons: Mapping[str, str]
) -> dict[str, Any]:
    """The cell's content for results.json."""
    cfg, draft = stock.cfg, next(iter(stock.cfg.drafts))
    prompts = texts[cell.text].reported[: cell.batch_size * cfg.decoders.num_timed[cell.batch_size]]
    known = stock.settings(cell.temperature)
    drafted = [
        Drafted(our_name(name), stock.family, draft, known[name], name) for name in timed_settings(stock, cell, choice)
    ]
    run = CellRun(cfg, stock.model, {draft: stock.drafter})
    content = run.time(cell, arms_of(stock, cell, choice, list(reasons)), drafted, prompts)
    return {**content, "left_out": dict(reasons), "vllm_version": stock.engines.version}
