"""What the suite would run, before any weight is loaded."""

from __future__ import annotations

from decode.models.load import ModelDescription
from eval.arms.base import ASSISTED, AUTOREGRESSIVE, STATIC, TRANSFORMERS
from eval.arms.transformers_arms import assisted_settings as assisted_settings
from eval.arms.transformers_arms import no_compiler
from eval.config import EvalConfig
from eval.measure.cells import Cell
from eval.modes.decoders.arms import LOOKUP, engine_names
from eval.modes.decoders.cells import cells
from eval.modes.decoders.config import arm_settings
from eval.plan import seconds_per_token

_WARM_UPS = 8
"""Calls per arm that choosing settings and warming up add to a cell."""
_PER_ROW = 0.07
"""Seconds that one more row adds to a pass, as a share of those of one row."""


def weight(cfg: EvalConfig, cell: Cell) -> float:
    """What a cell costs beside the others: its calls, each the slower the more rows it has."""
    return (cfg.decoders.num_timed[cell.batch_size] + _WARM_UPS) * (1 + _PER_ROW * (cell.batch_size - 1))


def _minutes(cfg: EvalConfig, target: ModelDescription) -> float:
    """An order of magnitude."""
    arms = 6 + len(cfg.decoders.fixed) + len(engine_names(cfg))
    calls = arms * cfg.timing.rounds * sum(weight(cfg, cell) for cell in cells(cfg))
    return calls * cfg.decode.max_new_tokens * seconds_per_token(target, cfg.target.device) / 60


def plan_lines(cfg: EvalConfig, target: ModelDescription) -> list[str]:
    """For a person."""
    tried = {temperature: arm_settings(cfg.decoders, cfg.decode, temperature) for temperature in cfg.temperatures}
    every = cells(cfg)
    peers = [TRANSFORMERS, STATIC, *engine_names(cfg)]
    batches = ", ".join(f"{count} of {rows}" for rows, count in cfg.decoders.num_timed.items())
    static = no_compiler()
    return [
        f"cells: {len(every)} ({', '.join(cell.name for cell in every)})",
        *(f"settings of ours tried at T={temperature:g}: {', '.join(names)}" for temperature, names in tried.items()),
        f"timed in each cell: {AUTOREGRESSIVE}, the best setting and the best plain chain, "
        f"{', '.join(cfg.decoders.fixed) or 'no others'}",
        f"peers: {', '.join(peers)}; one prompt at a time also {ASSISTED} (best of {len(assisted_settings(cfg.peers))} "
        f"settings) and {LOOKUP} (best of {len(cfg.peers.prompt_lookup_num_tokens)})",
        *([f"{STATIC} is left out: {static}"] if static else []),
        f"batches of prompts timed per cell: {batches}; {cfg.decode.max_new_tokens} new tokens each, "
        f"{cfg.timing.rounds} rounds",
        f"time: about {_minutes(cfg, target):.0f} min, compiling not counted (an order of magnitude)",
    ]
