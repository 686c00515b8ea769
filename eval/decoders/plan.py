"""What the suite would run, before any weight is loaded."""

from __future__ import annotations

from eval.config import EvalConfig
from eval.decoders.arms import LOOKUP
from eval.decoders.cells import cells
from eval.decoders.config import arm_settings
from eval.decoders.engines import engine_names
from eval.peers import NAME as ASSISTED
from eval.peers import settings as assisted_settings
from eval.speed import AUTOREGRESSIVE, TRANSFORMERS
from eval.static_cache import NAME as STATIC
from eval.static_cache import no_compiler


def plan_lines(cfg: EvalConfig) -> list[str]:
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
    ]
