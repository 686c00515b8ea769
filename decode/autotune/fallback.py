"""Plain rounds where drafting does not pay, and when to try again.

Where no depth beats plain rounds, or where drafting has lost PATIENCE rounds' worth of seconds since its last high,
rounds are plain for a gap, then one probes. A spell of drafting that lost L seconds on the whole is followed by at
least L / (SLACK t(0)) plain rounds, and by twice the gap before it (to LONGEST_GAP) unless it gained. So on text that
cannot be drafted all spells but the last together cost at most SLACK of the autoregressive time, and the last one at
most PATIENCE + 1 times what the deepest round costs more than a plain one; in a later call as well, since the debt is
kept with what else is known of the pair."""

from __future__ import annotations

import math
from collections.abc import Sequence

from decode.autotune.estimates import FORGET

SLACK = 0.02  # of the autoregressive time may go to probing, of the 3 % that are promised
LONGEST_GAP = 64  # plain rounds, unless more are owed: text that becomes draftable is noticed by then
PATIENCE = 12.0  # deepest rounds' worth of loss at which drafting ends although the estimates still favour it


class Fallback:
    """What drafting has won and lost, priced by the clock's medians: a hiccup is nobody's loss."""

    def __init__(self) -> None:
        self.is_fallen = False
        """Whether rounds are plain but for probes."""
        self._wait, self._gap = 0, 0
        self._spell = self._lost = self._emitted = self._seconds = 0.0

    @property
    def rate(self) -> tuple[float, float]:
        """(tokens a row, seconds) of the last rounds."""
        return self._emitted, self._seconds

    def price(self, emitted: float, depth: int, times: Sequence[float]) -> None:
        """Count a round of `depth` that emitted so many tokens a row; `times` are t(0) ... t(depth)."""
        self._emitted = FORGET * self._emitted + emitted
        self._seconds = FORGET * self._seconds + times[depth]
        if depth:
            loss = times[depth] - emitted * times[0]
            self._spell += loss
            self._lost = max(0.0, self._lost + loss)

    def waits(self) -> bool:
        """Whether the coming round is one of a gap; counts it."""
        waits = self._wait > 0
        self._wait -= waits
        return waits

    def end(self) -> None:
        """Draft again: a probe has been heard of, or another text begins of which more is hoped."""
        self.is_fallen, self._wait = False, 0

    def is_losing(self, times: Sequence[float]) -> bool:
        """Whether patience has ended; `times` are t(0) ... of the deepest round that is wanted."""
        return self._lost > PATIENCE * (times[-1] - times[0])

    def fall(self, plain_s: float) -> None:
        """End a spell of drafting."""
        owed = math.ceil(max(0.0, self._spell) / (SLACK * plain_s))
        self._gap = max(1, owed, min(2 * self._gap, LONGEST_GAP) if self._spell > 0 else 0)
        self._wait = self._gap - 1
        self._spell = self._lost = 0.0
        self.is_fallen = True
