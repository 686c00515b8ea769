"""The likely faults of a draft in an engine, by what it counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from transformers import PreTrainedModel

from decode.models.load import describe_loaded
from eval.modes.served.engine.metrics import Counters
from eval.modes.served.faults.counting import Texts, count, write
from eval.modes.served.faults.hypotheses import Hypothesis
from eval.modes.served.faults.reading import Reading, open_reading
from eval.modes.served.faults.table import HYPOTHESES

MOST = 3
"""Faults that are named where none has equal counters."""
NEAR = 0.02
"""Of the rounds: counters that differ by so few ties between tokens are near."""
BETTER = 4
"""Times nearer than ours are to the engine's."""
TELLING = 10
"""Accepted tokens from which on equal counters are no accident."""
RANDOM = frozenset(each.name for each in HYPOTHESES if each.is_random)


@dataclass(frozen=True)
class Fault:
    """One that explains an engine's counters."""

    name: str
    detail: str
    """What exactly was tried."""
    match: Literal["equal", "near"]
    """equal: with it we count what the engine counts; near: about that."""
    counters: Counters
    """Ours with the fault."""
    effect: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} ({self.detail}): {self.effect}. {self.remedy}"


def likely_faults(
    draft: str,
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    engine: Counters,
    ours: Counters,
    engine_name: str = "vllm",
) -> list[Fault]:
    """Faults that explain `engine`, what an engine counted at temperature 0 with the folder `draft` as it is served,
    `new_tokens` behind each of `prompts`, where our decoder counted `ours`; the nearest first. Those with equal
    counters alone, if there are any and the engine accepts more than next to nothing: counters cannot tell them apart.
    Empty where none explains them.

    The target is run over its own greedy texts; drafts are computed from the folder on the CPU in float32, alike for
    every fault. `draft` is a folder that passes `python -m train.check`.
    """
    reading = open_reading(draft, describe_loaded(target, check=False), engine_name)
    texts = write(target, prompts, new_tokens, len(ours.accepted))
    return explaining(reading, texts, engine, ours)


def explaining(reading: Reading, texts: Texts, engine: Counters, ours: Counters) -> list[Fault]:
    """As `likely_faults`, of a draft and texts that were read."""
    if distance(engine, ours) == 0:
        return []
    slack = distance(count(reading, texts), ours)
    found = [one for each in HYPOTHESES if reading.form in each.forms for one in _tried(each, reading, texts, engine)]
    equal = [fault for fault in found if fault.match == "equal"]
    if equal and sum(engine.accepted) >= TELLING:
        return equal
    most = max(NEAR * ours.drafts, slack)
    near = [fault for fault in found if fault not in equal and _is_near(fault, engine, ours, most)]
    return equal + sorted(near, key=lambda fault: distance(fault.counters, engine))[:MOST]


def _is_near(fault: Fault, engine: Counters, ours: Counters, most: float) -> bool:
    """By few ties, or as far as chance goes where the engine's numbers are random ones."""
    far = distance(fault.counters, engine)
    is_chance = fault.name in RANDOM and alike(fault.counters, engine)
    return far * BETTER <= distance(ours, engine) and (far <= most or is_chance)


def _tried(each: Hypothesis, reading: Reading, texts: Texts, engine: Counters) -> Iterator[Fault]:
    """The variants that come nearest."""
    tried = [(detail, count(altered, texts)) for detail, altered in each.variants(reading)]
    if tried:
        nearest = min(distance(counters, engine) for _, counters in tried)
        best = [(detail, counters) for detail, counters in tried if distance(counters, engine) == nearest]
        detail = "; or ".join(detail for detail, _ in best)
        yield Fault(each.name, detail, "near" if nearest else "equal", best[0][1], each.effect, each.remedy)


def distance(one: Counters, other: Counters) -> int:
    """Rounds and accepted tokens, position by position, that differ; behind the shorter one nothing is accepted."""
    width = max(len(one.accepted), len(other.accepted))
    first, second = ((each.drafts, *each.accepted, *[0] * (width - len(each.accepted))) for each in (one, other))
    return sum(abs(a - b) for a, b in zip(first, second, strict=True))


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
