"""One cell: its arms in one interleaved run, and what is kept of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eval.arms.assisted import NAME as ASSISTED
from eval.arms.ours import Arm
from eval.arms.static_cache import NAME as STATIC
from eval.arms.static_cache import no_compiler
from eval.measure.cells import Cell, arm_times
from eval.measure.component_times import ComponentTimes, CostMeter, is_plain_chain
from eval.measure.speed import mean_context
from eval.measure.timed_run import interleave, warm_up
from eval.modes.decoders.arms import LOOKUP, Stock, our_name
from eval.modes.decoders.choosing import OURS
from eval.modes.decoders.texts import TextPrompts
from eval.prompts.held_out import Prompt
from eval.results.cell_rows import Subject, make_row

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
            arms.append(_named(settings[choice["best"][family]], family))
    return [arm for arm in [*arms, *stock.vllm(temperature)] if arm.name not in without]


def _named(arm: Any, name: str) -> Arm:
    """A peer at its best setting bears the peer's own name, whichever setting that is."""
    return replace(arm, name=name)


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
    cfg, began = stock.cfg, time.perf_counter()
    prompts = texts[cell.text].reported[: cell.batch_size * cfg.decoders.num_timed[cell.batch_size]]
    names = timed_settings(stock, cell, choice)
    settings = {name: stock.settings(cell.temperature)[name] for name in names}
    meter = _meter(stock, cell, prompts, [one.num_draft_tokens for one in settings.values() if is_plain_chain(one)])
    samples = interleave(
        arms_of(stock, cell, choice, list(reasons)),
        prompts,
        cfg.decode.max_new_tokens,
        cfg.timing.rounds,
        cfg.seed,
        cell.batch_size,
        f"timing {cell.name}",
        between_rounds=meter.sample,
    )
    costs = meter.result()
    return {
        **cell.as_dict(),
        "prompts": len(prompts),
        "mean_tokens": sum(len(prompt.ids) for prompt in prompts) / len(prompts),
        "arms": [arm_times(name, samples) for name in samples],
        "rows": [
            make_row(_subject(stock, name), cell, one, samples, _costs(costs, one), cfg.seed)
            for name, one in settings.items()
        ],
        "left_out": dict(reasons),
        "vllm_version": stock.engines.version,
        "seconds": time.perf_counter() - began,
    }


def _meter(stock: Stock, cell: Cell, prompts: Sequence[Prompt], lengths: Sequence[int]) -> CostMeter:
    context = mean_context(prompts, stock.cfg.decode.max_new_tokens)
    repeats = stock.cfg.timing.cost_repeats
    drafters, sizes = {OURS: stock.drafter}, {OURS: sorted(set(lengths))}
    return CostMeter(stock.model, drafters, sizes, context, cell.batch_size, repeats)


def _costs(costs: Mapping[tuple[str, int], ComponentTimes], settings: Any) -> ComponentTimes | None:
    return costs[OURS, settings.num_draft_tokens] if is_plain_chain(settings) else None


def _subject(stock: Stock, name: str) -> Subject:
    dtype = str(stock.model.dtype).removeprefix("torch.")
    return Subject(our_name(name), stock.family, next(iter(stock.cfg.drafts)), name, dtype)
