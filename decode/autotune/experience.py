"""What adaptive calls of one pair of models have learned, kept from call to call on the drafter, so that a short call
does not begin from nothing: one `Experience` for each thing that the cost of a round or its acceptance depends on."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterable, Sequence

from torch import nn

from decode.autotune.estimates import FORGET, PRIOR, Acceptance, Calibration, Clock
from decode.forward.kept.weights_state import tensor_state, weights_state
from decode.forward.passes import holding
from decode.stats import Round

SLACK = 0.02  # of the autoregressive time may go to probing, of the 3 % that are promised
LONGEST_GAP = 64  # plain rounds, unless more are owed: text that becomes draftable is noticed by then
PATIENCE = 12.0  # deepest rounds' worth of loss at which drafting ends although the estimates still favour it


class Fallback:
    """Plain rounds where drafting does not pay, and when to try again.

    Where no depth beats plain rounds, or where drafting has lost PATIENCE rounds' worth of seconds since its last high,
    rounds are plain for a gap, then one probes. A spell of drafting that lost L seconds on the whole is followed by at
    least L / (SLACK t(0)) plain rounds, and by twice the gap before it (to LONGEST_GAP) unless it gained. So on text
    that cannot be drafted all spells but the last together cost at most SLACK of the autoregressive time, and the last
    one at most PATIENCE + 1 times what the deepest round costs more than a plain one; in a later call as well, since
    the debt is kept with what else is known of the pair.

    Rounds are priced by the clock's medians: a hiccup is nobody's loss.
    """

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


KEEP = 0.999  # of a count of accepted tokens is left after a round: the last 1000 rounds, some tens of calls
MOST_KEPT = 32  # of one drafter, the one not used for longest given up first: a service may be asked for anything
NAME = "_draftsmith_experience"


class Experience:
    """Of rounds of up to `depth` levels; calls of several threads may share one, under `lock`."""

    def __init__(self, depth: int) -> None:
        self.lock = threading.RLock()
        self.acceptance = Acceptance([PRIOR] * depth, forget=KEEP)
        self.clock, self.calibration, self.fallback = Clock(), Calibration(), Fallback()
        self._unpriced: list[tuple[int, float]] = []
        self._rounds, self._last_use = 0, dict[int, int]()

    def learn(self, rounds: Sequence[Round], seconds: float | None, drafted: int) -> None:
        """As `Budget.learn` has it."""
        if seconds is not None:
            self.clock.learn(drafted, seconds)
        if drafted:
            self.acceptance.learn(rounds)
        self._unpriced.append((drafted, sum(one.emitted for one in rounds) / len(rounds)))
        if self.clock.is_ready:
            for depth, tokens in self._unpriced:
                self.fallback.price(tokens, depth, self.clock.seconds(depth))
            self._unpriced = []

    def note(self, depth: int) -> None:
        """A round of this depth begins."""
        self._rounds += 1
        self._last_use[depth] = self._rounds

    def stale(self, rates: Sequence[float], depths: Iterable[int], least: int, cost: float) -> int | None:
        """The one of `depths` that has waited longest to be timed again, for `least` rounds, and for so many that a
        round of it loses no more than `cost` of their time; None where none has. A machine changes its pace, and a
        depth whose times are of slower days would never be chosen again."""
        best, waited = max(rates), {depth: self._rounds - self._last_use.get(depth, 0) for depth in depths}
        due = [depth for depth in waited if waited[depth] >= max(least, (best / rates[depth] - 1) / cost)]
        return max(due, key=waited.__getitem__, default=None)

    @classmethod
    def of(cls, drafter: object, model: nn.Module, key: Hashable, depth: int) -> Experience:
        """That of calls of `key` by this drafter and model, empty where either has changed since. One key for what the
        cost of a round depends on: rows, capacity, rule, sampling and shape."""
        with holding(model, *_models(drafter)):  # a pass hooks the models while it runs
            kept = getattr(drafter, "__dict__", {}).setdefault(NAME, _Kept())
            if kept is None:  # the drafter has been copied whole, or saved
                kept = vars(drafter)[NAME] = _Kept()
            one = (key, depth, weights_state(model), *_weights(drafter))
            found = kept.pop(one, None) or cls(depth)
            kept[one] = found
            if len(kept) > MOST_KEPT:
                del kept[next(iter(kept))]
            return found


def _weights(drafter: object) -> list[Hashable]:
    """The state of what a drafter drafts with; not of its own attributes, which every call changes."""
    if not isinstance(drafter, nn.Module):
        return [weights_state(part) for part in _parts(drafter)]
    own = (tensor_state(one) for one in drafter.parameters(recurse=False))
    return [*own, *(weights_state(part) for part in drafter.children())]


def _parts(drafter: object) -> list[nn.Module]:
    return [part for part in getattr(drafter, "__dict__", {}).values() if isinstance(part, nn.Module)]


def _models(drafter: object) -> list[nn.Module]:
    """What it runs passes over, by whatever module of it tells which (`passes.holding`)."""
    parts = [drafter] if isinstance(drafter, nn.Module) else _parts(drafter)
    return [module for part in parts for module in part.modules() if hasattr(module, "config")]


class _Kept(dict[Hashable, Experience]):
    """The oldest first."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or pickled drafter makes its own."""
        return type(None), ()
