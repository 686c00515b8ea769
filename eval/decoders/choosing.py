"""Which settings are timed: chosen on validation prompts, which are never reported, at each batch size and temperature.

Ours and the peers' are tried in one interleaved run over both kinds of text; the fastest median wins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from eval.arms import Arm
from eval.components import is_plain_chain
from eval.config import EvalConfig
from eval.decoders.arms import LOOKUP, Stock
from eval.decoders.cells import Point
from eval.decoders.texts import TextPrompts
from eval.measure import fastest, interleave, warm_up
from eval.peers import NAME as ASSISTED
from eval.prompts import Prompt
from eval.rows import tokens_per_s

OURS = "ours"


def candidates(stock: Stock, point: Point) -> dict[str, dict[str, Arm]]:
    """Family -> setting -> arm. transformers drafts for one prompt at a time, so beyond batch 1 only ours are tried."""
    families = {OURS: stock.ours(point.temperature)}
    if point.batch_size == 1:
        families |= {ASSISTED: stock.assisted(point.temperature), LOOKUP: stock.lookup(point.temperature)}
    return {family: arms for family, arms in families.items() if arms}


def choose(stock: Stock, point: Point, texts: Mapping[str, TextPrompts]) -> dict[str, Any]:
    """{"best": family -> setting, "best_chain": setting, "tokens_per_s": family -> setting -> speed}."""
    cfg, families, began = stock.cfg, candidates(stock, point), time.perf_counter()
    arms = [arm for family in families.values() for arm in family.values()]
    prompts = _screening_prompts(cfg, point, texts)
    warm_up(arms, prompts, point.batch_size, cfg.seed, cfg.timing.screening_tokens)
    label = f"choosing settings, {point.name}"
    samples = interleave(arms, prompts, cfg.timing.screening_tokens, 1, cfg.seed, point.batch_size, label)
    speeds = {
        family: {
            setting: tokens_per_s(samples[arm.name], range(len(samples[arm.name]))) for setting, arm in settings.items()
        }
        for family, settings in families.items()
    }
    chains = [name for name, one in stock.settings(point.temperature).items() if is_plain_chain(one)]
    return {
        "batch_size": point.batch_size,
        "temperature": point.temperature,
        "best": {family: fastest(of) for family, of in speeds.items()},
        "best_chain": fastest({name: speeds[OURS][name] for name in chains}) if chains else None,
        "tokens_per_s": speeds,
        "seconds": time.perf_counter() - began,
    }


def _screening_prompts(cfg: EvalConfig, point: Point, texts: Mapping[str, TextPrompts]) -> list[Prompt]:
    each = point.batch_size * cfg.decoders.screening_batches
    return [prompt for prompts in texts.values() for prompt in prompts.screening[:each]]
