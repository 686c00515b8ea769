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
from eval.results.row import tokens_per_s


def try_settings(
    cfg: EvalConfig, point: Point, families: Mapping[str, Mapping[str, Arm]], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """{"best": family -> setting, "tokens_per_s": family -> setting -> speed, "seconds"} of arms by family and
    setting, each continuing `prompts` by timing.screening_tokens tokens once."""
    began = time.perf_counter()
    arms = [arm for family in families.values() for arm in family.values()]
    warm_up(arms, prompts, point.batch_size, cfg.seed, cfg.timing.screening_tokens)
    label = f"choosing settings, {point.name}"
    samples = interleave(arms, prompts, cfg.timing.screening_tokens, 1, cfg.seed, point.batch_size, label)
    speeds = {
        family: {
            setting: tokens_per_s(samples[arm.name], range(len(samples[arm.name]))) for setting, arm in settings.items()
        }
        for family, settings in families.items()
    }
    return {
        "batch_size": point.batch_size,
        "temperature": point.temperature,
        "best": {family: fastest(of) for family, of in speeds.items()},
        "tokens_per_s": speeds,
        "seconds": time.perf_counter() - began,
    }
