"""The timed run: every arm answers every prompt in every round, one after another in a drawn order, so that drift
hits all alike; between rounds, what a draft token and a target pass cost alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedModel

from decode.acceptance import predicted_speedup
from decode.autotune.timing import Costs, measure
from decode.common.progress import progress
from decode.forward.runner import CAPTURE_AFTER, room_for
from decode.sampling.config import SamplingConfig
from decode.trees.tree_plans import chain
from distill.corpora.corpus import in_groups
from eval.arms.base import Arm, Sample
from eval.arms.ours import OurArm
from eval.measure.energy import NO_METER, EnergyMeter
from eval.prompts.prompt import Prompt
from eval.results.schema import ComponentTimes

Key = TypeVar("Key")

Samples = dict[str, list[list[Sample]]]
"""arm -> prompt group -> round."""


def order(arms: Sequence[Key], seed: int, turn: int, group: int) -> list[Key]:
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
    before_each: Callable[[], None] = lambda: None,
    meter: EnergyMeter = NO_METER,
) -> Samples:
    """Samples of all arms; prompts are grouped by `batch_size`, and a group's rows key its noise in every arm.

    `before_each` runs before each group in each round, for what else must be measured under the same conditions.
    `meter` stands around every call.
    """
    groups = [list(range(start, min(start + batch_size, len(prompts)))) for start in range(0, len(prompts), batch_size)]
    samples: Samples = {arm.name: [[] for _ in groups] for arm in arms}
    assert len(samples) == len(arms), "arm names are unique"
    with progress(rounds * len(groups) * len(arms), "calls", label) as bar:
        for turn in range(rounds):
            for number, rows in enumerate(groups):
                before_each()
                for arm in order(arms, seed, turn, number):
                    ids = [prompts[row].ids for row in rows]
                    sample, joules = meter.around(partial(arm.run, ids, rows, max_new_tokens, seed + turn))
                    samples[arm.name][number].append(replace(sample, joules=joules))
                    bar.update(1)
    return samples


MOST_SHARED = 16384
"""Tokens of all rows together that calls of short texts are given room for, that they share a cache with longer ones:
of an 8B model, 2 GB."""


def sharing_captures(longest: int, batch_size: int) -> AbstractContextManager[None]:
    """Calls inside have one cache and its captures, where their texts have at most `longest` tokens each."""
    return room_for(min(longest, MOST_SHARED // batch_size))


WARM_UPS = 2
"""Runs of every arm before it is timed by itself; a pass is captured after some uses of its shape."""


def warm_up(
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    batch_size: int,
    seed: int,
    max_new_tokens: int = 16,
    others: Sequence[Prompt] = (),
    times: int = 1,
) -> None:
    """Each arm so many times, unmeasured: first calls allocate, tune and compile. Our arms make all captures that they
    may need for these prompts and `others`, from the shortest batch as far as there is room."""
    group = [prompts[i % len(prompts)].ids for i in range(batch_size)]
    first = min((first_to_capture(one, batch_size) for one in (prompts, others) if one), key=len)
    with progress(times * len(arms), "arms", "warm-up") as bar:
        for arm in [*arms] * times:
            if isinstance(arm, OurArm):
                arm.capture_ahead([first] * batch_size, max_new_tokens)
            arm.run(group, list(range(batch_size)), max_new_tokens, seed)
            bar.update(1)


def first_to_capture(prompts: Sequence[Prompt], batch_size: int) -> tuple[int, ...]:
    """The longest prompt of the batch whose passes look at the fewest slots."""
    return min((max((one.ids for one in batch), key=len) for batch in in_groups(prompts, batch_size)), key=len)


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


def is_plain_chain(settings: SamplingConfig) -> bool:
    """Whether component times predict the speedup of these settings: k tokens a round, drafted and verified in turn."""
    return settings.tree == "chain" and not settings.adaptive and not settings.overlap


def promised_speedup(costs: ComponentTimes, tau: float) -> float:
    """tau * t_target(1) / (k * t_draft + t_target(k + 1))."""
    return predicted_speedup(tau, costs.num_draft_tokens, costs.t_target_1_s, costs.t_draft_s, costs.t_target_k1_s)


@dataclass
class CostMeter:
    """Collects component times in pieces spread over the timed run, so that they see the same machine as the arms."""

    model: PreTrainedModel
    drafters: Mapping[str, Any]
    draft_lengths: Mapping[str, Sequence[int]]
    """Drafter -> the k it is timed at."""
    context: int
    """Mean context of the run in tokens."""
    batch_size: int
    repeats: int
    """Forwards of each pass in a piece."""
    _pieces: dict[str, list[Costs]] = field(default_factory=dict)

    def warm_up(self) -> None:
        """Run every pass until it is captured, unmeasured: the arms' passes are captured by then, too."""
        for name in self.draft_lengths:
            self._measure(name, CAPTURE_AFTER)

    def sample(self) -> None:
        """One piece: every drafter's passes, interleaved."""
        for name in self.draft_lengths:
            self._pieces.setdefault(name, []).append(self._measure(name, self.repeats))

    def _measure(self, name: str, repeats: int) -> Costs:
        sizes = [1, *(self._drafted(name, k) + 1 for k in self.draft_lengths[name])]
        return measure(self.model, self.drafters[name], self.context, sizes, self.batch_size, repeats)

    def result(self) -> dict[tuple[str, int], ComponentTimes]:
        """(drafter, k) -> medians over the pieces; a target pass of one size is the same for all drafters, so it is
        pooled."""
        by_size: dict[int, list[float]] = {}
        for piece in (one for pieces in self._pieces.values() for one in pieces):
            for size, seconds in piece.t_target.items():
                by_size.setdefault(size, []).append(seconds)
        target = {size: median(seconds) for size, seconds in by_size.items()}
        found = {}
        for name, k in ((name, k) for name, lengths in self.draft_lengths.items() for k in lengths):
            drafted, t_draft = self._drafted(name, k), median(one.t_draft for one in self._pieces[name])
            found[name, k] = ComponentTimes(
                num_draft_tokens=drafted,
                t_target_1_s=target[1],
                t_target_k1_s=target[drafted + 1],
                t_draft_s=t_draft,
            )
        return found

    def _drafted(self, name: str, k: int) -> int:
        """Tokens of a round that is asked for k."""
        return self.drafters[name].drafted_depth(chain(k))
