"""One cell: its arms in one interleaved run, and what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.arms.assisted import NAME as ASSISTED
from eval.arms.build import renamed
from eval.arms.ours import Arm
from eval.arms.static_cache import NAME as STATIC
from eval.arms.static_cache import no_compiler
from eval.measure.cell_run import CellRun
from eval.measure.cells import Cell
from eval.measure.timed_run import warm_up
from eval.modes.decoders.arms import LOOKUP, Stock, our_name
from eval.modes.decoders.choosing import OURS
from eval.modes.decoders.texts import TextPrompts
from eval.prompts.held_out import Prompt
from eval.results.figures import Drafted

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
