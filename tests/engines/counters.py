"""Texts, rounds and accepted tokens by position, ours and vLLM's, counted alike: texts go on to the end of the round
that reaches their limit, as the worker's do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from decode import generate
from decode.drafters.base import Drafter
from decode.stats import Round
from eval.modes.served.counting import Pair


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
    texts = Pair(target, len(prompts)).write(prompts, new_tokens + k, temperature=0.0, seed=0)
    return counters_along(target, drafter, prompts, texts, new_tokens, k)


def greedy_rounds(
    target: PreTrainedModel, drafter: Drafter, prompts: Sequence[list[int]], new_tokens: int, k: int
) -> tuple[list[list[int]], list[Round]]:
    """Texts that reach beyond `new_tokens`, and the rounds behind the first token of each."""

    def write(drafter: Drafter | None, begun: Sequence[list[int]], number: int) -> tuple[list[list[int]], list[Round]]:
        settings = {"max_new_tokens": number, "temperature": 0.0, "num_draft_tokens": k, "seed": 0}
        out = generate(target, drafter, torch.tensor(begun), eos_token_id=(), **settings)
        return out.sequences[:, len(begun[0]) :].tolist(), out.stats.rounds

    first = write(None, prompts, 1)[0]
    begun = [prompt + ids for prompt, ids in zip(prompts, first, strict=True)]
    texts, rounds = write(drafter, begun, new_tokens - 1 + 2 * (k + 1))
    return [a + b for a, b in zip(first, texts, strict=True)], rounds


def counters_along(
    target: PreTrainedModel, drafter: Drafter, prompts: Sequence[list[int]], texts: list[list[int]], limit: int, k: int
) -> Counters:
    """Those of texts that were written, to the end of the round that reaches `limit` at least."""
    padded = [[*text, *[0] * k] for text in texts]
    each = Pair(target, len(prompts)).counters_along(drafter, prompts, padded, limit, k)
    ends = [1 + one.drafts + sum(one.accepted) for one in each]
    total = sum(each[1:], each[0])
    return Counters([text[:end] for text, end in zip(texts, ends, strict=True)], total.drafts, list(total.accepted))
