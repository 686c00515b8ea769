"""Rounds and accepted tokens by position, ours and vLLM's, counted alike.

vLLM takes the first token from the prefill and drafts after it: so our prompts are extended by that token. It counts
what it accepts behind the limit of a text: so ours end where a round ends that reaches the limit, as the worker's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode import generate
from decode.drafters.base import Context, Drafter
from decode.stats import Round
from decode.trees.tree import Tree


@dataclass(frozen=True)
class Counters:
    """What a run of a draft came to."""

    texts: list[list[int]]
    """New tokens of each prompt, to the end of the round that reached the limit."""
    rounds: int
    accepted: list[int]
    """Rounds whose i-th drafted token was accepted, i = 1, ..., k."""


def our_counters(
    target: PreTrainedModel, drafter: Drafter, prompts: Sequence[list[int]], new_tokens: int, k: int
) -> Counters:
    """Greedy texts with `drafter`."""
    return _counted(*greedy_rounds(target, drafter, prompts, new_tokens, k), new_tokens, k)


def greedy_rounds(
    target: PreTrainedModel, drafter: Drafter, prompts: Sequence[list[int]], new_tokens: int, k: int
) -> tuple[list[list[int]], list[Round]]:
    """Texts that reach beyond `new_tokens`, and the rounds behind the first token of each."""
    first = _greedy(target, None, prompts, 1, k)[0]
    begun = [prompt + ids for prompt, ids in zip(prompts, first, strict=True)]
    texts, rounds = _greedy(target, drafter, begun, new_tokens - 1 + 2 * (k + 1), k)
    return [a + b for a, b in zip(first, texts, strict=True)], rounds


def counters_along(
    target: PreTrainedModel, drafter: Drafter, prompts: Sequence[list[int]], texts: list[list[int]], limit: int, k: int
) -> Counters:
    """Of the argmaxes that `drafter` drafts along texts that were written, rounds that reach `limit` being the last:
    what rejection accepts of a draft without a distribution. It draws the target's token from what p has left where it
    refuses one, so what it writes there is never what was drafted."""
    begun = [prompt + text[:1] for prompt, text in zip(prompts, texts, strict=True)]
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]

    def written(row: int, ids: Tensor) -> list[int]:
        text = whole[row]
        return text[len(ids) : len(ids) + 1] or [0]

    found, rounds = _greedy(
        target, Unaware(drafter), begun, limit - 1 + 2 * (k + 1), k, prefix_allowed_tokens_fn=written
    )
    return _counted([text[:1] + new for text, new in zip(texts, found, strict=True)], rounds, limit, k)


class Unaware:
    """A draft that is not told what the target may write."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.taps = drafter, drafter.taps

    def start(self, context: Context, capacity: int) -> None:
        self.drafter.start(replace(context, history=None), capacity)

    def propose(self, context: Context) -> Tree:
        return self.drafter.propose(replace(context, history=None))

    def reset(self, rows: list[int]) -> None:
        self.drafter.reset(rows)


def _greedy(
    target: PreTrainedModel,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    new_tokens: int,
    k: int,
    **more: Any,
) -> tuple[list[list[int]], list[Round]]:
    length = len(prompts[0])
    out = generate(
        target, drafter, torch.tensor(prompts), max_new_tokens=new_tokens, eos_token_id=(), temperature=0.0,
        num_draft_tokens=k, seed=0, **more,
    )  # fmt: skip
    return out.sequences[:, length:].tolist(), out.stats.rounds


def _counted(texts: list[list[int]], rounds: Sequence[Round], limit: int, k: int) -> Counters:
    lengths = [1] * len(texts)
    counted = []
    for one in rounds:
        if lengths[one.row] < limit:
            lengths[one.row] += one.emitted
            counted.append(one)
    accepted = [sum(one.accepted > place for one in counted) for place in range(k)]
    return Counters([text[:length] for text, length in zip(texts, lengths, strict=True)], len(counted), accepted)
