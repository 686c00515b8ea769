"""Captures made ahead: every round that a call may need is run until it is replayed, so that the call itself is not
held up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.api import generate
from decode.autotune.budget import REHEARSED
from decode.config import SamplingConfig, sampling_config
from decode.drafters.base import Drafter, drafted_depth
from decode.forward.runner import CAPTURE_AFTER
from decode.forward.slot_stack import bucket
from decode.requests import Event
from decode.trees.tree_plans import chain, parse

SEED = 0x5EED  # of its own: under rejection a draft length must not be chosen by the numbers that a call draws


class _EnoughError(Exception):
    """Ends a call that has made its rounds."""


def warm_up(
    model: PreTrainedModel, drafter: Drafter | None, input_ids: Tensor, max_new_tokens: int, **settings: Any
) -> float:
    """Make the captures that `generate` with these arguments can need; returns the seconds that it took.

    `input_ids` (B, T) stand for the prompts to come: the captures are of B rows and of caches for T + max_new_tokens
    tokens. `settings` are those of `generate`. With adaptive=True rounds of every depth are captured, else those of the
    whole draft and plain ones, behind every number of slots from T on. Their times are kept, so that an adaptive call
    knows them. Raises what `generate` raises.
    """
    began, prompt_length = time.perf_counter(), input_ids.shape[1]
    known = {one.name for one in fields(SamplingConfig)}  # the others are arguments of `generate` itself
    asked = sampling_config({name: one for name, one in settings.items() if name in known})
    chosen_later = asked.tree == "sequoia"  # of which no level is beyond its nodes
    shape = chain(asked.tree_nodes) if chosen_later else parse(asked.tree, asked.num_draft_tokens, asked.tree_nodes)
    deepest = 0 if drafter is None else drafted_depth(drafter, shape)
    depths = range(deepest + 1) if asked.adaptive else {0, deepest}
    for length, room in _stretches(prompt_length, prompt_length + max_new_tokens):
        prompt = input_ids[:, torch.arange(length, device=input_ids.device) % prompt_length]
        left = prompt_length + max_new_tokens - length
        for depth in depths:
            _rehearse(model, drafter, prompt, left, depth, room, {**settings, "adaptive": drafter is not None})
    return time.perf_counter() - began


def _stretches(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """(first length, tokens) of the parts of a text, prompt of `begin` tokens included, behind which passes look at as
    many slots."""
    while begin < end:
        last = min(bucket(begin), end)
        yield begin, last - begin + 1
        begin = last + 1


def _rehearse(
    model: PreTrainedModel,
    drafter: Drafter | None,
    prompt: Tensor,
    left: int,
    depth: int,
    room: int,
    settings: dict[str, Any],
) -> None:
    """Rounds of one depth in one stretch, in as many calls as that takes, since a round adds up to depth + 1 tokens."""
    each = max(1, room // (depth + 1))
    for _ in range(-(-(CAPTURE_AFTER + 1) // each)):
        rounds = count(1)

        def enough(_: Event, rounds: Iterator[int] = rounds) -> None:
            if next(rounds) >= each * len(prompt):
                raise _EnoughError

        token = REHEARSED.set(depth)
        try:
            with suppress(_EnoughError):
                generate(
                    model, drafter, prompt, torch.ones_like(prompt),
                    max_new_tokens=left, observer=enough, seed=SEED, **settings,
                )  # fmt: skip
        finally:
            REHEARSED.reset(token)
