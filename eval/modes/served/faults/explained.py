"""What is said of counters that part."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from decode.common.progress import get_logger
from eval.modes.served.engine.metrics import Counters
from eval.modes.served.faults.faults import Each, likely_faults, total
from eval.modes.served.faults.reading import is_tried

NOTHING = 0.02
"""Share of first tokens below which next to nothing is accepted."""
SAME = 0.03
"""Shares that differ by no more are taken for equal."""


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
        word = "lower" if theirs[0] < own[0] else "higher"
        return [
            f"position 1 is accepted {'less' if word == 'lower' else 'more'} often than with us ({theirs[0]:.1%} for "
            f"{own[0]:.1%}): the first pass itself reads something else (hidden states, embedding, weights, precision)"
        ]
    return ["every position is accepted about as with us: ties between tokens, as another precision breaks them"]


log = get_logger("eval")
_DEEP = "Faults are tried on EAGLE-3 heads of one layer alone, and this one has more."
_NONE = (
    "None of the faults that were tried explains this. A prefix cache (--no-enable-prefix-caching), another revision "
    "of the draft and two faults at once look so; see what python -m train.check says of the folder that is served."
)


def explained(
    draft: str,
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    engine: Each,
    ours: Each,
    engine_name: str = "vllm",
) -> list[str]:
    """Sentences, the likely faults first, then what the counters say by themselves; see `likely_faults`."""
    seen = [f"{one[0].upper()}{one[1:]}." for one in observed(total(engine), total(ours), len(ours[0].accepted))]
    if not is_tried(draft):
        return [_DEEP, *seen]
    log.info("counters part: trying faults on %s", draft)
    found = likely_faults(draft, target, prompts, texts, engine, ours, engine_name)
    named = [f"Likely fault: {fault}." for fault in found]
    return [*(named or [_NONE]), *seen]
