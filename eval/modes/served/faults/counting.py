"""Rounds of a draft along texts that are known: at temperature 0 whatever is drafted, the text is the target's own, so
a draft that is read otherwise is counted without decoding anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.models.hidden_states import Taps
from eval.modes.served.engine.metrics import Counters
from eval.modes.served.faults.reading import Reading
from train.check.agreement import accepted, rounds_of

States = dict[tuple[int, ...], list[Tensor]]


@dataclass(frozen=True)
class Texts:
    """Prompts with what the target writes on from them, and its hidden states there, read when they are asked for."""

    target: PreTrainedModel
    ids: Sequence[Tensor]
    """(T,) each, so many tokens behind `limit` as a round may accept there."""
    lengths: Sequence[int]
    """Tokens of each prompt."""
    limit: int
    """New tokens that were asked for of each."""
    k: int
    """Tokens of a round that were asked for."""
    _states: States = field(default_factory=dict)

    @torch.no_grad()
    def states(self, taps: tuple[int, ...]) -> list[Tensor]:
        """(T, n, d) of each text, in float32 on the CPU."""
        if taps not in self._states:
            hooks = Taps(self.target, taps)
            found = []
            with hooks:
                for ids in self.ids:
                    self.target(ids[None].to(self.target.device), use_cache=False)
                    found.append(hooks.stacked()[0].float().cpu())
            self._states[taps] = found
        return self._states[taps]


def along(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], limit: int, k: int
) -> Texts:
    """What was written behind prompts, at least k tokens more than `limit` of each."""
    assert all(len(text) >= limit + k for text in texts), (limit, k)
    ids = [torch.tensor([*prompt, *text]) for prompt, text in zip(prompts, texts, strict=True)]
    return Texts(target, ids, [len(prompt) for prompt in prompts], limit, k)


@torch.no_grad()
def count(reading: Reading, texts: Texts) -> list[Counters]:
    """What an engine counts that reads the draft so, one for each text.

    The first new token is the prefill's; rounds begin behind it, while fewer than `limit` are written. What a round
    accepts behind the limit counts, as in vLLM.
    """
    steps = texts.k if reading.depth is None else min(texts.k, reading.depth)
    drafting = reading.drafting()
    states = texts.states(reading.taps) if reading.taps else [torch.empty(0)] * len(texts.ids)
    found = []
    for ids, length, features in zip(texts.ids, texts.lengths, states, strict=True):
        places = torch.arange(length, length + texts.limit - 1)
        rounds = rounds_of(accepted(drafting(ids, features, places, steps), ids, places))
        stood = tuple(sum(one > place for one in rounds) for place in range(texts.k))
        found.append(Counters(len(rounds), len(rounds) * texts.k, stood))
    return found
