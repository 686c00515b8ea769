"""Which checkpoint is kept: the one that promises most tokens per target pass on held-out text, not the lowest loss.

Loss and acceptance part ways: an EAGLE-3 run peaked in accepted length at epoch 4.6 while its loss kept falling
(DeepSpec issue 84). Where no p is known there is no acceptance to estimate, and the lowest loss decides.
"""

from __future__ import annotations

import math

from decode.common.errors import RunError
from train.metric_sums import Sums


def score(validation: Sums) -> float:
    """Larger is better: the tau estimate where p is known, else minus the loss; -inf where that is NaN. RunError where
    nothing was counted."""
    means = validation.means()
    value = means["tau"]
    if value is None:
        if means["loss"] is None:
            raise RunError(
                "the validation counted no token: none of its rows has one that this draft learns to draft. Use a "
                "longer sequence_length, more validation_rows, or a smaller window or draft.head.depth"
            )
        value = -means["loss"]
    return -math.inf if math.isnan(value) else value  # nothing is larger than NaN: kept once, it would stay


def rule(validation: Sums) -> str:
    """What `score` compares, in words for the model card."""
    return "highest validation tau estimate" if validation.tau_count else "lowest validation loss"
