"""Accepted tokens by where in the context they were drafted: a draft may do well on short texts alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from decode.stats import Round
from eval.results.statistics import bootstrap, described, ratio_of_sums

SHORT = 256
"""Tokens up to which all contexts are one bucket; from there on each is twice as long as the one before."""


def bucket(context: int) -> int:
    """The least context of its bucket, in tokens: 0, SHORT, 2 SHORT, 4 SHORT ..."""
    return 0 if context < SHORT else SHORT << ((context // SHORT).bit_length() - 1)


def tau_by_context(rounds: Sequence[Sequence[Round]], seed: int) -> list[dict[str, Any]]:
    """Of target passes by prompt, tokens emitted per pass in each bucket that has any, shortest contexts first, with an
    interval over the prompts that reached it; passes that do not tell their context are left out."""
    counts: dict[int, np.ndarray] = {}
    for place, group in enumerate(rounds):
        for one in group:
            if one.context is not None:
                found = counts.setdefault(bucket(one.context), np.zeros((len(rounds), 2)))
                found[place] += (one.emitted, 1)
    return [_described(least, counts[least], seed) for least in sorted(counts)]


def _described(least: int, counts: np.ndarray, seed: int) -> dict[str, Any]:
    """counts (prompts, 2): tokens emitted, passes."""
    reached = counts[counts[:, 1] > 0]
    return {
        "context_from": least,
        "context_below": 2 * least or SHORT,
        "prompts": len(reached),
        "passes": int(reached[:, 1].sum()),
        **described("tau", bootstrap(reached, ratio_of_sums, seed)),
    }
