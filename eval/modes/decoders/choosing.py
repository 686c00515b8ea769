"""Which settings are timed: chosen on validation prompts, which are never reported, at each batch size and temperature.

Ours and the peers' are tried in one interleaved run over both kinds of text; the fastest median wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.arms.assisted import NAME as ASSISTED
from eval.arms.ours import Arm
from eval.config import EvalConfig
from eval.measure.cells import Point
from eval.measure.choose import choose as fastest_settings
from eval.measure.component_times import is_plain_chain
from eval.measure.timed_run import fastest
from eval.modes.decoders.arms import LOOKUP, Stock
from eval.modes.decoders.texts import TextPrompts
from eval.prompts.held_out import Prompt

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
