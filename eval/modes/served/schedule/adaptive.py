"""SGLang's adaptive draft lengths (sglang 0.5.23, srt/speculative/adaptive_spec_params.py), from what was measured.

    {"1": {"candidate_steps": [0, 4], "down_hysteresis": -0.3, ...}, "8": {"candidate_steps": [0], ...}}

The number is the batch size from which an entry holds. SGLang keeps a moving average of the tokens accepted per round.
In an entry of the steps 0 and k it stops drafting where that average falls to 0.5 + down_hysteresis, and tries k again
a few batches later. Drafting k tokens is as fast as none where

    (1 + accepted) / seconds of a round = 1 / seconds of a plain step,

and the ratio of the seconds is (1 + accepted tokens measured) / (speed measured / speed of the target alone). So the
threshold is that number of accepted tokens: text that is easier than it is drafted for, other text is not. A longer
draft than k was not faster when it was measured, and is no candidate. An entry has one threshold for all of its steps,
so the steps between 0 and k are left out.

Below the threshold five batches in ten are still drafted, since SGLang tries again so often (`update_interval`). It
adapts EAGLE and EAGLE-3 in chains alone; with other algorithms it leaves the flag aside, with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.modes.served.schedule.schedule import Choice

_TO_ZERO = 0.5  # accepted tokens at which SGLang gives up drafting, before the hysteresis is added
ADAPTIVE = frozenset({"eagle3"})
"""Forms of draft that SGLang serves as EAGLE."""


def break_even(accepted: float, speedup: float) -> float:
    """Accepted tokens per round at which drafting is as fast as the target alone, where `accepted` gave `speedup`."""
    return (1 + accepted) / speedup - 1


def adaptive_config(chosen: Sequence[Choice], accepted: Mapping[int, float]) -> dict[str, Any]:
    """The content of the file for --speculative-adaptive-config, of the lengths chosen by batch size and the accepted
    tokens per round by draft length. Between two measured batch sizes the shorter of their drafts stands."""
    entries = {}
    measured_to, k_before = 0, 0
    for one in chosen:
        is_next = not measured_to or one.k <= k_before
        entries[str(measured_to + 1 if is_next else one.batch_size)] = _entry(one, accepted)
        measured_to, k_before = one.batch_size, one.k
    return entries


def _entry(one: Choice, accepted: Mapping[int, float]) -> dict[str, Any]:
    steps, below = [0], 0.0
    if one.k:
        steps = [0, one.k]
        below = round(break_even(accepted[one.k], one.over_plain.value) - _TO_ZERO, 3)
    return {"candidate_steps": steps, "up_hysteresis": 0.0, "down_hysteresis": below, "ceiling_coeff": 0}
