"""Which of the settings tried is recommended, and whether the choice would hold on other prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decode.common.errors import InputError
from eval.comparison_config import PLAIN

RESAMPLES = 2_000
LEAST_OVER_PLAIN, SURE = 0.97, 0.95
"""A draft is recommended where so large a share of resamples has it at least so many times as fast as plain."""


def held_choice(seconds: Mapping[str, Sequence[float | None]], seed: int) -> dict[str, Any]:
    """{"setting", "share", "loss", "over_plain"} by seconds per token, setting -> batch of prompts, resampled together.

    `setting` has the highest median speed among plain decoding and those that are sure not to be behind it; `share` of
    resamples choose it as well; `loss` is the share of speed, on all prompts, that a choice by a resample gives away on
    the average (bootstrap of the selection, Efron 1979). `over_plain`: setting -> share of resamples in which it is no
    slower than 0.97 of plain, where plain decoding was tried. InputError where
    nothing was timed.
    """
    names, speeds = list(seconds), _speeds(seconds)  # (batches, settings)
    if not len(speeds):
        raise InputError(
            f"no batch of prompts was timed by all of {', '.join(names)}: in each, a text ended with its first token, "
            "which leaves no time between tokens; raise timing.screening_tokens, or give other prompts"
        )
    drawn = np.random.default_rng(seed).integers(0, len(speeds), (RESAMPLES, len(speeds)))
    medians, whole = np.median(speeds[drawn], axis=1), np.median(speeds, axis=0)
    over_plain = _over_plain(names, medians)
    is_safe = np.array([over_plain.get(name, 1.0) >= SURE for name in names])
    chosen, picked = np.where(is_safe, whole, 0).argmax(), np.where(is_safe, medians, 0).argmax(1)
    return {
        "setting": names[chosen],
        "share": float((picked == chosen).mean()),
        "loss": float((1 - whole[picked] / whole[chosen]).mean()),
        "over_plain": over_plain,
    }


def _speeds(seconds: Mapping[str, Sequence[float | None]]) -> np.ndarray:
    """Tokens per second of the batches that every setting has timed."""
    table = np.array([[np.nan if one is None else one for one in row] for row in seconds.values()], dtype=float).T
    return 1 / table[np.isfinite(table).all(1)]


def _over_plain(names: list[str], medians: np.ndarray) -> dict[str, float]:
    """Nothing where plain decoding was not tried."""
    if PLAIN not in names:
        return {}
    shares = (medians >= LEAST_OVER_PLAIN * medians[:, [names.index(PLAIN)]]).mean(0)
    return dict(zip(names, shares.tolist(), strict=True))
