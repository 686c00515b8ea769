"""Texts that follow a draft for a few tokens of every round, as those of a target do that it was trained on: random
heads on random targets agree with nothing else, and training takes too long."""

from __future__ import annotations

import random

import torch
from transformers import PreTrainedModel

from eval.modes.served.faults.counting import Texts
from eval.modes.served.faults.reading import Reading

AGREED = 0.75
"""Chance that a drafted token is the text's."""


def follow(reading: Reading, target: PreTrainedModel, prompts: list[list[int]], limit: int, k: int) -> Texts:
    """Texts of a target that would accept each drafted token with that chance."""
    drawn = random.Random(0)
    ids = [torch.tensor(_followed(reading, target, list(prompt), limit + k + 1, k, drawn)) for prompt in prompts]
    return Texts(target, ids, [len(prompt) for prompt in prompts], limit, k)


def _followed(
    reading: Reading, target: PreTrainedModel, ids: list[int], new: int, k: int, drawn: random.Random
) -> list[int]:
    end, size = len(ids) + new, target.config.get_text_config().vocab_size
    ids = [*ids, drawn.randrange(size)]
    while len(ids) < end:
        accepted = next((step for step in range(k) if drawn.random() > AGREED), k)
        for step in range(accepted):
            ids.append(_drafted(reading, target, ids, step))
        refused = _drafted(reading, target, ids, accepted) if accepted < k else -1
        ids.append(next(one for one in iter(lambda: drawn.randrange(size), None) if one != refused))
    return ids[:end]


def _drafted(reading: Reading, target: PreTrainedModel, ids: list[int], step: int) -> int:
    """The token that the draft says behind `ids`, of which the last `step` are its own of this round."""
    padded = torch.tensor([*ids, *[0] * (step + 1)])
    place = torch.tensor([len(ids) - 1 - step])
    states = Texts(target, [padded], [1], 1, 1).states(reading.taps)[0] if reading.taps else torch.empty(0)
    return int(reading.drafting()(padded, states, place, step + 1)[step, 0])
