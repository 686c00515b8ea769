"""Which settings are timed: the fastest median of one interleaved run over prompts that are never reported."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from eval.arms.ours import Arm
from eval.config import EvalConfig
from eval.measure.cells import Point
from eval.measure.timed_run import fastest, interleave, warm_up
from eval.prompts.held_out import Prompt
from eval.results.figures import tokens_per_s


def choose(
    cfg: EvalConfig, point: Point, families: Mapping[str, Mapping[str, Arm]], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """{"best": family -> setting, "tokens_per_s": family -> setting -> speed, "prompts", "seconds"} of arms by family
    and setting, each continuing `prompts` by timing.screening_tokens tokens once."""
    began, size, tokens = time.perf_counter(), point.batch_size, cfg.timing.screening_tokens
    arms = [arm for family in families.values() for arm in family.values()]
    warm_up(arms, prompts, size, cfg.seed, tokens)
    samples = interleave(arms, prompts, tokens, 1, cfg.seed, size, f"choosing settings, {point.name}")
    speeds = {
        family: {setting: tokens_per_s(samples[arm.name]) for setting, arm in settings.items()}
        for family, settings in families.items()
    }
    return {
        "batch_size": size,
        "temperature": point.temperature,
        "best": {family: fastest(of) for family, of in speeds.items()},
        "tokens_per_s": speeds,
        "prompts": len(prompts),
        "seconds": time.perf_counter() - began,
    }
