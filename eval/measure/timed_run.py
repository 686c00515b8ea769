"""The timed run: every arm answers every prompt in every round, one after another in a drawn order, so that drift
hits all alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from decode.common.progress import progress
from eval.arms.base import Arm, Sample
from eval.prompts.held_out import Prompt

Key = TypeVar("Key")

Samples = dict[str, list[list[Sample]]]
"""arm -> prompt group -> round."""


def order(arms: Sequence[Arm], seed: int, turn: int, group: int) -> list[Arm]:
    """The order of the arms for one prompt group in one round: a permutation drawn from all three numbers."""
    shuffled = list(arms)
    random.Random(f"{seed}/{turn}/{group}").shuffle(shuffled)
    return shuffled


def interleave(
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    rounds: int,
    seed: int,
    batch_size: int,
    label: str,
    between_rounds: Callable[[], None] = lambda: None,
) -> Samples:
    """Samples of all arms; prompts are grouped by `batch_size`, and a group's rows key its noise in every arm.

    `between_rounds` runs before each round, for what else must be measured under the same conditions.
    """
    groups = [list(range(start, min(start + batch_size, len(prompts)))) for start in range(0, len(prompts), batch_size)]
    samples: Samples = {arm.name: [[] for _ in groups] for arm in arms}
    assert len(samples) == len(arms), "arm names are unique"
    with progress(rounds * len(groups) * len(arms), "calls", label) as bar:
        for turn in range(rounds):
            between_rounds()
            for number, rows in enumerate(groups):
                for arm in order(arms, seed, turn, number):
                    ids = [prompts[row].ids for row in rows]
                    samples[arm.name][number].append(arm.run(ids, rows, max_new_tokens, seed + turn))
                    bar.update(1)
    return samples


def warm_up(
    arms: Sequence[Arm], prompts: Sequence[Prompt], batch_size: int, seed: int, max_new_tokens: int = 16
) -> None:
    """Each arm once, unmeasured: first calls allocate, tune and compile."""
    group = [prompts[i % len(prompts)].ids for i in range(batch_size)]
    with progress(len(arms), "arms", "warm-up") as bar:
        for arm in arms:
            arm.run(group, list(range(batch_size)), max_new_tokens, seed)
            bar.update(1)


def fastest(speeds: Mapping[Key, float | None]) -> Key:
    """The key of the highest speed; what could not be timed comes last."""
    return max(speeds, key=lambda name: speeds[name] or 0.0)


def seconds_per_token(samples: Sequence[Sequence[Sample]]) -> np.ndarray:  # (groups,)
    """Per group, decode seconds over decode tokens, totals over its rounds; NaN where nothing came after the first
    arrival."""
    seconds = np.array([sum(sample.decode_s for sample in group) for group in samples])
    tokens = np.array([sum(sample.decode_tokens for sample in group) for group in samples], dtype=float)
    return np.divide(seconds, tokens, out=np.full(len(seconds), np.nan), where=tokens > 0)


def call_seconds_per_token(samples: Sequence[Sequence[Sample]]) -> np.ndarray:  # (groups,)
    """Per group, seconds of the whole call, prompt included, over emitted tokens."""
    return np.array([sum(s.seconds for s in group) / sum(s.tokens for s in group) for group in samples])
