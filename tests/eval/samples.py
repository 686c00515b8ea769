"""Timed runs made up by hand, so that every figure made of them can be worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode.common.typed_config import build
from decode.stats import Round
from eval.arms.base import AUTOREGRESSIVE, TRANSFORMERS, Sample
from eval.config import EvalConfig
from eval.measure.timed_run import Samples
from eval.prompts.prompt import Prompt


def config(**changes: Any) -> EvalConfig:
    """One draft `d`, drafting 2 tokens."""
    values = {"output_dir": "x", "target": {"path": "t"}, "drafts": {"d": "d"}, "decode": {"num_draft_tokens": 2}}
    return build(EvalConfig, {**values, **changes})


def sample(
    new: Sequence[Sequence[int]] = ((1,) * 11,),
    pace: float = 0.1,
    first_s: float = 0.5,
    arrivals: Sequence[float] = (),
    rounds: Sequence[Round] = (),
    peak_memory_bytes: int = 0,
) -> Sample:
    """A call that brings one token a prompt after `first_s` seconds, and the others at `pace` seconds each."""
    ids = [list(each) for each in new]
    seconds = first_s + pace * (sum(map(len, ids)) - len(ids))
    return Sample(ids, seconds, first_s, len(ids), list(arrivals or [first_s]), list(rounds), peak_memory_bytes)


def at_paces(*paces: float, **fields: Any) -> list[list[Sample]]:
    """One prompt a pace, answered once, in 11 tokens."""
    return [[sample(pace=pace, **fields)] for pace in paces]


TEXTS = ([1, 2, 3, 4, 1, 2, 3, 4, 9, 8, 7], list(range(11)), list(range(20, 31)))
ALL, NONE, ONE = Round(0, 2, 2, 3), Round(0, 2, 0, 1), Round(0, 2, 1, 2)


def timed_samples(arm: str) -> Samples:
    """Three prompts. The loop is the faster way without a draft by the median, and `arm` is 4, 2 and 1 times as fast;
    transformers is the faster one by the mean. The second text leaves that of the loop at its fourth token."""
    ours = [
        [sample([TEXTS[0]], 0.1, 0.2, [0.2, 0.3, 0.5], [ALL, ALL], 5)],
        [sample([TEXTS[1]], 0.2, 0.4, [0.4, 0.8], [NONE] * 5, 7)],
        [sample([TEXTS[2]], 0.4, 1.2, [1.2], [ONE, NONE], 6)],
    ]
    flipped = [*TEXTS[1][:3], 60, *TEXTS[1][4:]]
    alone = [[sample([ids], 0.4)] for ids in (TEXTS[0], flipped, TEXTS[2])]
    return {arm: ours, AUTOREGRESSIVE: alone, TRANSFORMERS: at_paces(0.5, 0.5, 0.1)}


def prompts(number: int, name: str = "p", tokens: int = 4) -> list[Prompt]:
    """Prompts that name themselves."""
    return [Prompt(f"{name}{i}", None, (i + 1,) * tokens) for i in range(number)]


class FakeArm:
    """Notes the prompts, rows, limits and seeds of its calls; all tokens but the first come at `pace` seconds each."""

    def __init__(self, name: str, pace: float = 0.1) -> None:
        self.name, self.pace = name, pace
        self.calls: list[tuple[list[tuple[int, ...]], list[int], int, int]] = []

    def run(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], max_new_tokens: int, seed: int) -> Sample:
        self.calls.append(([tuple(ids) for ids in prompts], list(rows), max_new_tokens, seed))
        return sample([[1] * max_new_tokens for _ in prompts], self.pace, rounds=[NONE] * max_new_tokens)

    @property
    def asked(self) -> set[tuple[int, ...]]:
        """Every prompt that it was given."""
        return {ids for call in self.calls for ids in call[0]}
