"""What rounds teach: acceptance by position, seconds by size of round, and what the draft's own confidence is worth.
Counts are forgotten exponentially, because text changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median_low

import numpy as np

from decode.acceptance import Outcome

FORGET = 0.98  # of a count is left after a round: the last 50 rounds decide
PRIOR, PRIOR_WEIGHT = 0.7, 2.0  # acceptance before anything is known, and the tokens that outweigh it
POOL_WEIGHT = 4.0  # tokens of its own that outweigh, at a position, what all positions say
KEPT = 21  # times a size; their median follows a growing context and passes over hiccups
BINS = 10


class Acceptance:
    """P(i-th draft token accepted | those before it were), each position drawn towards what all of them together say of
    the `prior`, one probability a position that `weight` tokens outweigh."""

    def __init__(self, prior: Sequence[float], weight: float = PRIOR_WEIGHT, forget: float = FORGET) -> None:
        self.prior, self.weight, self.forget = list(prior), weight, forget
        self.tried, self.taken = [0.0] * len(prior), [0.0] * len(prior)

    def learn(self, rounds: Iterable[Outcome]) -> None:
        """Count one round of the batch."""
        self.tried = [n * self.forget for n in self.tried]
        self.taken = [n * self.forget for n in self.taken]
        for one in rounds:
            for i in range(min(one.drafted, one.accepted + 1, len(self.prior))):
                self.tried[i] += 1
                self.taken[i] += one.accepted > i

    def estimates(self) -> list[float]:
        """One probability a position."""
        if not self.prior:
            return []
        promised = sum(prior * n for prior, n in zip(self.prior, self.tried, strict=True))
        head_start = self.weight * self.prior[0]
        kept = (sum(self.taken) + head_start) / (promised + head_start)
        pairs = zip(self.prior, self.taken, self.tried, strict=True)
        return [_posterior(yes, n, min(1.0, prior * kept), POOL_WEIGHT) for prior, yes, n in pairs]

    def expected(self, depth: int) -> list[float]:
        """E(0), E(1), ... E(depth): tokens a round emits, 1 + sum of products of the estimates."""
        reach, total = 1.0, [1.0]
        for estimate in self.estimates()[:depth]:
            reach *= estimate
            total.append(total[-1] + reach)
        return total


class Clock:
    """Seconds of a round by its depth: medians of the last uses, never falling with depth, a line between them."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._fitted: tuple[list[int], list[float]] | None = None

    def learn(self, depth: int, seconds: float) -> None:
        """Note a round."""
        self._times.setdefault(depth, deque(maxlen=KEPT)).append(seconds)
        self._fitted = None

    def knows(self, depth: int) -> bool:
        """Whether a round of this depth has been timed; a plain one twice, as everything is compared with it."""
        return len(self._times.get(depth, ())) > (depth == 0)

    @property
    def is_ready(self) -> bool:
        """Whether plain rounds and deeper ones have been timed."""
        return self.knows(0) and len(self._times) > 1

    def seconds(self, deepest: int) -> list[float]:
        """t(0), t(1), ... t(deepest), where `is_ready`."""
        self._fitted = self._fitted or self._fit()
        depths, times = self._fitted
        if deepest > depths[-1] > depths[0]:  # past the last on the line from the first to the last
            slope = (times[-1] - times[0]) / (depths[-1] - depths[0])
            depths, times = [*depths, deepest], [*times, times[0] + slope * (deepest - depths[0])]
        return np.interp(range(deepest + 1), depths, times).tolist()

    def _fit(self) -> tuple[list[int], list[float]]:
        """Depths and seconds; asked for by every drafted token, and the same until a round is noted."""
        depths = sorted(self._times)
        times = [median_low(self._times[depth]) for depth in depths]
        return depths, monotone(times, [float(len(self._times[depth])) for depth in depths])


class Calibration:
    """P(accepted) of a drafted token by the probability that the draft gave it: bins with a Beta prior, made
    monotone."""

    def __init__(self) -> None:
        self._tried, self._taken = [0.0] * BINS, [0.0] * BINS
        self._values = self._curve()

    def learn(self, rounds: Iterable[Outcome], confidences: Sequence[Sequence[float]]) -> None:
        """Count one round: `confidences` are those of each outcome's drafted tokens."""
        self._tried, self._taken = [n * FORGET for n in self._tried], [n * FORGET for n in self._taken]
        for one, row in zip(rounds, confidences, strict=True):
            for i in range(min(one.drafted, one.accepted + 1)):
                self._tried[_bin(row[i])] += 1
                self._taken[_bin(row[i])] += one.accepted > i
        self._values = self._curve()

    def __call__(self, confidence: float) -> float:
        """P(accepted), given that the tokens before were."""
        return self._values[_bin(confidence)]

    def _curve(self) -> list[float]:
        """The prior of a bin is its own middle: a draft that knows how often it is right."""
        pairs = enumerate(zip(self._taken, self._tried, strict=True))
        raw = [_posterior(yes, n, (bin_ + 0.5) / BINS, PRIOR_WEIGHT) for bin_, (yes, n) in pairs]
        return monotone(raw, [n + PRIOR_WEIGHT for n in self._tried])


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest never falling sequence in weighted squares (pool adjacent violators)."""
    from scipy.optimize import isotonic_regression  # half a second, which importing decode would cost everybody

    return isotonic_regression(values, weights=weights).x.tolist()


def _posterior(yes: float, tried: float, prior: float, weight: float) -> float:
    return (yes + weight * prior) / (tried + weight)


def _bin(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1)
