"""What adaptive calls of one pair of models have learned, kept from call to call on the drafter, so that a short call
does not begin from nothing: one `Experience` for each thing that the cost of a round or its acceptance depends on."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence

from torch import nn

from decode.autotune.estimates import PRIOR, Acceptance, Calibration, Clock
from decode.autotune.fallback import Fallback
from decode.forward.kept.weights_state import tensor_state, weights_state
from decode.forward.passes import holding
from decode.stats import Round

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
