"""The likely faults of a draft in an engine, by what it counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from transformers import PreTrainedModel

from decode.models.load import describe_loaded
from eval.modes.served.engine.metrics import Counters
from eval.modes.served.faults.counting import Texts, along, count
from eval.modes.served.faults.hypotheses import Hypothesis
from eval.modes.served.faults.reading import Reading, open_reading
from eval.modes.served.faults.table import HYPOTHESES

MOST = 3
"""Faults that are named where none has equal counters."""
NEAR = 0.02
"""Of the rounds: counters that differ by so few ties between tokens are near."""
LEFT = 0.05
"""Of what sets ours apart from the engine's: a fault that leaves no more unexplained is near. A fault that makes drafts
worse makes more rounds and more ties: of `norm_output left out` 0, 2 or over 3 of 250 counters part, by machine."""
BETTER = 4
"""Times nearer than ours are to the engine's."""
TELLING = 10
"""Accepted tokens from which on equal counters are no accident."""
Each = Sequence[Counters]
"""One for each prompt."""


@dataclass(frozen=True)
class Fault:
    """One that explains an engine's counters."""

    name: str
    detail: str
    """What exactly was tried."""
    match: Literal["equal", "near"]
    """equal: with it we count what the engine counts; near: about that."""
    counters: Counters
    """Ours with the fault, over all prompts."""
    effect: str
    remedy: str

    def __str__(self) -> str:
        same = "the same counters" if self.match == "equal" else "nearly these counters"
        return f"{self.name} ({self.detail}) gives {same}: {self.effect}. {self.remedy}"


def likely_faults(
    draft: str,
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    engine: Each,
    ours: Each,
    engine_name: str = "vllm",
) -> list[Fault]:
    """Faults that explain `engine`, what an engine counted at temperature 0 with the folder `draft` as it is served,
    where our decoder counted `ours` along the same `texts` behind `prompts`; the nearest first. Those with equal
    counters alone, if there are any and the engine accepts more than next to nothing: counters cannot tell them apart.
    Empty where none explains them.

    Texts have k tokens more than were asked for, since rounds reach beyond. The target is run over them; drafts are
    computed from the folder on the CPU in float32, alike for every fault. `draft` is a folder that passes
    `python -m train.check`.
    """
    k = len(ours[0].accepted)
    reading = open_reading(draft, describe_loaded(target, check=False), engine_name)
    return explaining(reading, along(target, prompts, texts, len(texts[0]) - k, k), engine, ours)


def explaining(reading: Reading, texts: Texts, engine: Each, ours: Each) -> list[Fault]:
    """As `likely_faults`, of a draft and texts that were read."""
    if distance(engine, ours) == 0:
        return []
    slack = distance(count(reading, texts), ours)
    tried = [one for each in HYPOTHESES if reading.form in each.forms for one in _tried(each, reading, texts, engine)]
    equal = [fault for fault, far, _ in tried if far == 0]
    if equal and sum(total(engine).accepted) >= TELLING:
        return equal
    most = max(NEAR * total(ours).drafts, LEFT * distance(ours, engine), slack)
    near = [
        (far, fault)
        for fault, far, is_random in tried
        if 0 < far * BETTER <= distance(ours, engine)
        and (far <= most or (is_random and alike(fault.counters, total(engine))))
    ]
    return equal + [fault for _, fault in sorted(near, key=lambda one: one[0])][:MOST]


def _tried(each: Hypothesis, reading: Reading, texts: Texts, engine: Each) -> Iterator[tuple[Fault, int, bool]]:
    """The variants that come nearest, and how far they are."""
    tried = [(detail, count(altered, texts)) for detail, altered in each.variants(reading)]
    if tried:
        far = min(distance(counters, engine) for _, counters in tried)
        best = [(detail, counters) for detail, counters in tried if distance(counters, engine) == far]
        detail, match = "; or ".join(detail for detail, _ in best), "near" if far else "equal"
        yield Fault(each.name, detail, match, total(best[0][1]), each.effect, each.remedy), far, each.is_random


def total(each: Each) -> Counters:
    """Over all prompts."""
    return sum(each[1:], each[0])


def distance(one: Each, other: Each) -> int:
    """Rounds and accepted tokens, prompt by prompt and position by position, that differ."""
    return sum(
        abs(a - b)
        for first, second in zip(one, other, strict=True)
        for a, b in zip((first.drafts, *first.accepted), (second.drafts, *second.accepted), strict=True)
    )


def alike(one: Counters, other: Counters) -> bool:
    """Whether shares accepted at each position differ by no more than chance: three standard deviations."""
    reached = zip((one.drafts, *one.accepted), (other.drafts, *other.accepted), strict=False)
    pairs = list(reached)
    return all(
        _same_share((now[0], before[0]), (now[1], before[1])) for before, now in zip(pairs, pairs[1:], strict=False)
    )


def _same_share(one: tuple[int, int], other: tuple[int, int]) -> bool:
    if not one[1] or not other[1]:
        return one[0] == other[0] == 0
    share = (one[0] + other[0]) / (one[1] + other[1])
    spread = sqrt(share * (1 - share) * (1 / one[1] + 1 / other[1]))
    return abs(one[0] / one[1] - other[0] / other[1]) <= 3 * spread + 1e-12
