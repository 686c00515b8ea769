"""What is said of counters that part: the likely faults of a draft in an engine, by what it counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from transformers import PreTrainedModel

from decode.common.progress import get_logger
from decode.models.describe import describe_loaded
from eval.modes.served.engine.metrics import Counters, total
from eval.modes.served.faults.counting import Texts, along, count
from eval.modes.served.faults.inputs import GIVEN, LOST
from eval.modes.served.faults.layers import LAYERS, OF_FORMS
from eval.modes.served.faults.reading import Hypothesis, Reading, is_tried, open_reading

HYPOTHESES = (*GIVEN, *LAYERS, *LOST, *OF_FORMS)
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
NOTHING = 0.02
"""Share of first tokens below which next to nothing is accepted."""
SAME = 0.03
"""Shares that differ by no more are taken for equal."""
Tokens = Sequence[Sequence[int]]
Counted = Sequence[Counters]
"""By prompt."""
log = get_logger("eval")
_DEEP = "Faults are tried on EAGLE-3 heads of one layer alone, and this one has more."
_NONE = (
    "None of the faults that were tried explains this. A prefix cache (--no-enable-prefix-caching), another revision "
    "of the draft and two faults at once look so; see what python -m train.check says of the folder that is served."
)


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


def explained(
    draft: str, target: PreTrainedModel, prompts: Tokens, texts: Tokens, engine: Counted, ours: Counted
) -> list[str]:
    """Sentences on `engine`, what an engine counted at temperature 0 with the folder `draft` as it is served, where our
    decoder counted `ours` along the same `texts` behind `prompts`: the likely faults first, then what the counters say
    by themselves. Texts have k tokens more than were asked for, since rounds reach beyond. `draft` is a folder that
    passes `python -m train.check`."""
    k = len(ours[0].accepted)
    seen = [f"{one[0].upper()}{one[1:]}." for one in observed(total(engine), total(ours), k)]
    if not is_tried(draft):
        return [_DEEP, *seen]
    log.info("counters part: trying faults on %s", draft)
    reading = open_reading(draft, describe_loaded(target, check=False))
    found = likely_faults(reading, along(target, prompts, texts, len(texts[0]) - k, k), engine, ours)
    return [*([f"Likely fault: {fault}." for fault in found] or [_NONE]), *seen]


def likely_faults(reading: Reading, texts: Texts, engine: Counted, ours: Counted) -> list[Fault]:
    """Faults that explain the engine's counters, the nearest first. Those with equal counters alone, if there are any
    and the engine accepts more than next to nothing: counters cannot tell them apart. Empty where none explains them.
    Drafts are computed from the folder on the CPU in float32, alike for every fault, and the target is run over the
    texts."""
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


def _tried(each: Hypothesis, reading: Reading, texts: Texts, engine: Counted) -> Iterator[tuple[Fault, int, bool]]:
    """The variants that come nearest, and how far they are."""
    tried = [(detail, count(altered, texts)) for detail, altered in each.variants(reading)]
    if tried:
        far = min(distance(counters, engine) for _, counters in tried)
        best = [(detail, counters) for detail, counters in tried if distance(counters, engine) == far]
        detail, match = "; or ".join(detail for detail, _ in best), "near" if far else "equal"
        yield Fault(each.name, detail, match, total(best[0][1]), each.effect, each.remedy), far, each.is_random


def distance(one: Counted, other: Counted) -> int:
    """Rounds and accepted tokens, prompt by prompt and position by position, that differ."""
    return sum(
        abs(a - b)
        for first, second in zip(one, other, strict=True)
        for a, b in zip((first.drafts, *first.accepted), (second.drafts, *second.accepted), strict=True)
    )


def alike(one: Counters, other: Counters) -> bool:
    """Whether shares accepted at each position differ by no more than chance: three standard deviations."""
    pairs = list(zip((one.drafts, *one.accepted), (other.drafts, *other.accepted), strict=False))
    return all(
        _same_share((now[0], before[0]), (now[1], before[1])) for before, now in zip(pairs, pairs[1:], strict=False)
    )


def _same_share(one: tuple[int, int], other: tuple[int, int]) -> bool:
    if not one[1] or not other[1]:
        return one[0] == other[0] == 0
    share = (one[0] + other[0]) / (one[1] + other[1])
    spread = sqrt(share * (1 - share) * (1 / one[1] + 1 / other[1]))
    return abs(one[0] / one[1] - other[0] / other[1]) <= 3 * spread + 1e-12


def observed(engine: Counters, ours: Counters, k: int) -> list[str]:
    """Sentences about the engine's counters beside ours, with k tokens a round asked for."""
    if not engine.drafts:
        return [
            "the engine counted no draft at all: it does not draft, or the metrics are another server's. Look for "
            "speculative_config in its log"
        ]
    return [*_lengths(engine, k), *_positions(engine, ours)]


def _lengths(engine: Counters, k: int) -> list[str]:
    each = engine.drafted / engine.drafts
    if len(engine.accepted) == k and abs(each - k) < SAME:
        return []
    return [
        f"the engine drafts {each:.2f} tokens a round at {len(engine.accepted)} positions, and {k} are asked for: its "
        "num_speculative_tokens is another, or a schedule by batch size shortens it"
    ]


def _positions(engine: Counters, ours: Counters) -> list[str]:
    theirs, own = engine.by_position, ours.by_position
    if not theirs or not own or theirs[0] is None or own[0] is None:
        return []
    if theirs[0] < NOTHING <= own[0]:
        return [
            "next to nothing is accepted at position 1: drafted tokens stand for other ones (the map of the draft "
            "vocabulary), weights were not loaded, or the draft is another target's"
        ]
    gaps = [abs(a - b) for a, b in zip(theirs, own, strict=False) if a is not None and b is not None]
    lower = [place + 1 for place, gap in enumerate(gaps) if gap > SAME]
    if gaps[0] <= SAME and lower:
        return [
            f"position 1 is accepted as with us, and position{'s' if len(lower) > 1 else ''} "
            f"{', '.join(map(str, lower))} otherwise: the first pass is right, and what is fed back is not (rotary "
            "positions, the state before or behind the last norm, heads out of order)"
        ]
    if gaps[0] > SAME:
        word = "less" if theirs[0] < own[0] else "more"
        return [
            f"position 1 is accepted {word} often than with us ({theirs[0]:.1%} for "
            f"{own[0]:.1%}): the first pass itself reads something else (hidden states, embedding, weights, precision)"
        ]
    return ["every position is accepted about as with us: ties between tokens, as another precision breaks them"]
