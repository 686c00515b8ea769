"""Captures made ahead: every round that a call may need is run until it is replayed, so that the call itself is not
held up."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.api import generate
from decode.autotune.budget import REHEARSED
from decode.drafters.base import Drafter
from decode.forward.runner import CAPTURE_AFTER, Look, look_at
from decode.forward.slot_stack import bucket
from decode.requests import Event
from decode.sampling.config import SamplingConfig, sampling_config
from decode.trees.tree_plans import Shape, parse

SEED = 0x5EED  # of its own: under rejection a draft length must not be chosen by the numbers that a call draws


ENOUGH = 2 * CAPTURE_AFTER
"""Rounds of one depth and way: the last ones, replays, tell adaptive drafting what they cost."""
MOST_CALLS = 40
"""Of one depth at one number of slots, for each of the drafter's ways: some prompts are answered by one token, whatever
the seed."""


class _EnoughError(Exception):
    """Ends a call that has made its rounds."""


def warm_up(
    model: PreTrainedModel, drafter: Drafter | None, input_ids: Tensor, max_new_tokens: int, **settings: Any
) -> float:
    """Make the captures that `generate` with these arguments can need; returns the seconds that it took.

    `input_ids` (B, T) stand for the prompts to come: the captures are of B rows and of caches for T + max_new_tokens
    tokens. `settings` are those of `generate`. With adaptive=True rounds of every depth are captured, else those of the
    whole draft and plain ones (with overlap=True what most rounds run, drafts in turn and ahead), each over every
    number of slots that passes look at on the way from T to the end and the last draft behind it. Times are kept, so
    that an adaptive call knows them. Raises what `generate` raises.
    """
    began = time.perf_counter()
    known = {one.name for one in fields(SamplingConfig)}  # the others are arguments of `generate` itself
    asked = sampling_config({name: one for name, one in settings.items() if name in known})
    shape = parse(asked.tree, asked.num_draft_tokens, asked.tree_nodes)
    deepest = 0 if drafter is None else drafter.drafted_depth(shape)
    depths = range(deepest + 1) if asked.adaptive else {deepest} if asked.overlap else {0, deepest}
    drafted = 0 if drafter is None else max(shape.num_nodes + drafter.most_passengers, shape.num_read + 1)
    drafted += deepest + 1 if asked.overlap else 0
    settings = {**settings, "adaptive": drafter is not None and not asked.overlap}
    slots, end = input_ids.shape[1], input_ids.shape[1] + max_new_tokens + drafted
    while slots < end:
        # a round without a draft looks at as many as the deepest one before it: each size is rehearsed at every depth
        with look_at(bucket(slots + 1)) as look:
            for depth in depths:
                _rehearse(model, drafter, input_ids, max_new_tokens, shape.cut(depth), drafted, look, settings)
        slots = look.slots
    return time.perf_counter() - began


def _rehearse(
    model: PreTrainedModel,
    drafter: Drafter | None,
    prompt: Tensor,
    max_new_tokens: int,
    shape: Shape,
    drafted: int,
    look: Look,
    settings: dict[str, Any],
) -> None:
    """Rounds of one depth, in as many calls as that takes: one adds up to that and a token and needs slots for
    `drafted` ones, behind `look.slots` passes look at more, and a text may end at its first token, or, with another
    seed, later."""
    rounds, depth = 0, shape.depth
    token = REHEARSED.set(depth)
    ways = (2 if settings.get("overlap") else 1 if drafter is None else drafter.ways(shape)) if depth else 1
    try:
        for seed in range(SEED, SEED + MOST_CALLS * ways):
            room = min(max_new_tokens, look.slots - prompt.shape[1] - drafted)
            watch = _Watch(max(1, min(room // (depth + 1), ENOUGH * ways - rounds)) * len(prompt))
            with suppress(_EnoughError):
                generate(
                    model, drafter, prompt, torch.ones_like(prompt),
                    max_new_tokens=max_new_tokens, observer=watch, seed=seed, **settings,
                )  # fmt: skip
            rounds += watch.rounds
            if rounds > CAPTURE_AFTER * ways:
                return
    finally:
        REHEARSED.reset(token)


class _Watch:
    """Counts the rounds of a call, and ends it after `most` events, one a row and round."""

    def __init__(self, most: int) -> None:
        self.rounds, self._most, self._shares, self._rows = 0, most, 0, set[int]()

    def __call__(self, event: Event) -> None:
        if event.row in self._rows or not self._rows:
            self.rounds, self._rows = self.rounds + 1, set()
        self._rows.add(event.row)
        self._shares += 1
        if self._shares >= self._most:
            raise _EnoughError
