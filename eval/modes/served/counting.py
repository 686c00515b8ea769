"""What our decoder counts, drafting as an engine does: rounds and accepted tokens by position, prompt by prompt.

An engine (vLLM 0.32, v1/core/sched/scheduler.py) takes the first token from the prompt's own pass and drafts after it,
as many tokens in every round, each the draft's likeliest. It counts what it accepts behind the last token that was
asked for: so ours go on to the end of the round that reaches it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from decode import generate
from decode.api import Output
from decode.drafters.base import Context, Drafter
from decode.stats import Round
from decode.trees.tree import Tree
from eval.measure.continuations import left_padded
from eval.modes.served.engine.metrics import Counters

Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Pair:
    """A target and how many prompts it decodes at once."""

    target: PreTrainedModel
    batch_size: int

    def write(self, prompts: Texts, new_tokens: int, temperature: float, seed: int) -> list[list[int]]:
        """What the target writes alone, ends of text ignored."""
        out = self._generate(None, prompts, new_tokens, temperature=temperature, seed=seed)
        return out.sequences[:, max(map(len, prompts)) :].tolist()

    def counters_along(self, drafter: Drafter, prompts: Texts, texts: Texts, limit: int, k: int) -> list[Counters]:
        """Of the argmaxes that `drafter` drafts along texts that were written, one for each prompt; the last round is
        the one that reaches `limit` tokens, and texts are k tokens longer than that at least.

        So many are accepted by every rule that keeps the target's distribution, of a draft that is no sample: where a
        token is refused, the target's own is drawn from what p has left, and is never the one that was drafted.
        """
        assert all(len(text) >= limit + k for text in texts)
        begun = [[*prompt, *text[:1]] for prompt, text in zip(prompts, texts, strict=True)]
        whole = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]

        def written(row: int, ids: Tensor) -> list[int]:
            return whole[row][len(ids) : len(ids) + 1] or [0]

        out = self._generate(
            Unaware(drafter),
            begun,
            limit - 1 + 2 * (k + 1),  # no draft is cut short that counts
            temperature=0.0,
            seed=0,
            num_draft_tokens=k,
            prefix_allowed_tokens_fn=written,
        )
        return counted(out.stats.rounds, len(begun), limit, k)

    def _generate(self, drafter: Drafter | None, prompts: Texts, new_tokens: int, **settings: Any) -> Output:
        ids, mask = left_padded(prompts, 0, self.target.device)
        return generate(
            self.target,
            drafter,
            ids,
            mask,
            max_new_tokens=new_tokens,
            eos_token_id=(),
            stop_strings=(),
            batch_size=self.batch_size,
            **settings,
        )


class Unaware(Drafter):
    """A draft that is not told what the target may write."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.taps, self.on_host = drafter, drafter.taps, drafter.on_host

    def start(self, context: Context, capacity: int) -> None:
        self.drafter.start(replace(context, history=None), capacity)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        self.drafter.read(replace(context, history=None), lengths)

    def prepare(self, context: Context) -> Hashable | None:
        return self.drafter.prepare(replace(context, history=None))

    def propose(self, context: Context) -> Tree:
        return self.drafter.propose(replace(context, history=None))


def counted(rounds: Sequence[Round], prompts: int, limit: int, k: int) -> list[Counters]:
    """Counters of each prompt, whose text had one token before the first round and ends with the round that reaches
    `limit`."""
    lengths = [1] * prompts
    drafts, accepted = [0] * prompts, [[0] * k for _ in range(prompts)]
    for one in rounds:
        if lengths[one.row] >= limit:
            continue
        lengths[one.row] += one.emitted
        drafts[one.row] += 1
        for place in range(one.accepted):
            accepted[one.row][place] += 1
    assert all(length >= limit for length in lengths), (lengths, limit)
    each = zip(drafts, accepted, strict=True)
    return [Counters(number, number * k, tuple(places)) for number, places in each]
