"""How much to draft in a round: what pays best by the acceptance and the seconds seen so far, and nothing where nothing
pays.

Length: before a round, k in 0..k_max with the highest E(k)/t(k); k = 0 is a plain autoregressive round. Of a tree, k is
the number of levels kept. Confidence: inside a round, one more draft token while the gain it promises, P(this far
accepted and the next as well), beats what the seconds t(j + 1) - t(j) are worth at the rate of tokens of the last
rounds (the optimal stopping rule of a renewal process: its long-run rate is the price of a second). A switch of its
own, because it asks the host after every step and gives up the fused draft: simulated with calibrated drafts it gains
up to 16 % at equal cost a step, nothing where all tokens are equally sure, and mostly loses where steps cost half as
much again (six fused steps of the quickstart's draft take 3.4 ms, one by one 5.0).

Fallback: where no k beats 0, or where drafting has lost PATIENCE rounds' worth of seconds since its last high, rounds
are plain for a gap, then one probes. A spell of drafting that lost L seconds on the whole is followed by at least
L / (SLACK t(0)) plain rounds, and by twice the gap before it (to LONGEST_GAP) unless it gained. So on text that cannot
be drafted all spells but the last together cost at most SLACK = 2.5 % of the autoregressive time, and the last one at
most PATIENCE + 1 times what the deepest round costs more than a plain one.

Exactness: what is chosen before a round looks at earlier rounds only, and whether to go on inside one at tokens up to
the last one drafted, which stays in the tree: a stopping time, under which rejection and block verification keep their
distribution. (Dropping the last token for its own value does not: the tests show the bias.) Coupled is exact whatever
is looked at. A draft that predicts its acceptance (DSpark) is asked about a token by what is known before it is drawn:
a stopping time as well, even though the whole block is drafted as one unit and cut afterwards, and no token is verified
that was not expected to pay. Its chances pass the same calibration, since they were learned at temperature 1 and of
rejection.

The first three classes hold what a call learns while it runs: acceptance by position, seconds by size of round, and
what the draft's own confidence is worth. Counts are forgotten exponentially, because text changes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median_low

import numpy as np

from decode.acceptance import Outcome
from decode.stats import Round
from decode.trees.tree_plans import Shape

FORGET = 0.98  # of a count is left after a round: the last 50 rounds decide
PRIOR, PRIOR_WEIGHT = 0.7, 2.0  # acceptance before anything is known, and the tokens that outweigh it
POOL_WEIGHT = 4.0  # tokens of its own that outweigh, at a position, what all positions say
KEPT = 9  # times a size; their median follows a growing context and passes over hiccups
BINS = 10
SLACK = 0.025  # of the autoregressive time may go to probing: half of the 5 % that are promised
LONGEST_GAP = 64  # plain rounds, unless more are owed: text that becomes draftable is noticed by then
PATIENCE = 8.0  # deepest rounds' worth of loss at which drafting ends although the estimates still favour it
NEW_DEPTH = 1.05  # times the best rate in use that a new depth must promise: its passes are yet to be captured
REFRESH = 32  # rounds after which t(0) is measured again where it decides


class Acceptance:
    """P(i-th draft token accepted | those before it were), each position drawn towards all of them together."""

    def __init__(self, depth: int) -> None:
        self.tried, self.taken = [0.0] * depth, [0.0] * depth

    def learn(self, rounds: Iterable[Outcome]) -> None:
        """Count one round of the batch."""
        self.keep(FORGET)
        for one in rounds:
            for i in range(min(one.drafted, one.accepted + 1)):
                self.tried[i] += 1
                self.taken[i] += one.accepted > i

    def keep(self, share: float) -> None:
        """Forget all but this share of the counts."""
        self.tried, self.taken = [n * share for n in self.tried], [n * share for n in self.taken]

    def estimates(self) -> list[float]:
        """One probability a position."""
        pooled = _posterior(sum(self.taken), sum(self.tried), PRIOR, PRIOR_WEIGHT)
        return [_posterior(yes, n, pooled, POOL_WEIGHT) for yes, n in zip(self.taken, self.tried, strict=True)]

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


class Budget:
    """The draft lengths of one call, rows pooled; `depth` is the deepest round that is wanted and that the draft can
    draft. `by_confidence`: a round that drafts at all may go that deep, and ends where `goes_on` says."""

    def __init__(self, depth: int, by_confidence: bool = False) -> None:
        self.by_confidence = by_confidence
        self.acceptance, self.clock, self.calibration = Acceptance(depth), Clock(), Calibration()
        self.depth = 0
        """Levels of the round that runs."""
        self._deepest, self._first = depth, (depth + 1) // 2
        self._confidences: list[list[float]] = []
        self._unpriced: list[tuple[int, float]] = []
        self._fallen, self._wait, self._gap, self._since_plain = False, 0, 0, 0
        self._spell = self._lost = self._emitted = self._seconds = 0.0

    def next_shape(self, shape: Shape, left: int) -> Shape:
        """The coming round's cut of `shape`; plain where no row can emit more than `left` = 1 token."""
        self.depth = self._choose(min(shape.depth, self._deepest) if left > 1 else 0)
        self._confidences = []
        return shape.cut(self.depth)

    def goes_on(self, confidence: Sequence[float], drafted: int) -> bool:
        """Whether to draft one more after `drafted` tokens: `confidence` (rows that have not ended,) is the draft's own
        probability of the last one, which is in the tree by now and stays there."""
        self._confidences = [*self._confidences[: drafted - 1], list(confidence)]
        if drafted >= self.depth or not self.clock.is_ready:
            return drafted < self.depth
        return self._pays(drafted, self.acceptance.estimates()[drafted])

    def takes(self, chance: Sequence[float], drafted: int) -> bool:
        """Whether to draw one more token after `drafted` ones: `chance` (rows that have not ended,) is what the draft
        predicts of it, from tokens in the tree by now. The first one always is: its pass has been paid for."""
        self._confidences = [*self._confidences[:drafted], list(chance)]
        taken = not drafted or not self.clock.is_ready or self._pays(drafted)
        self._confidences = self._confidences[: drafted + taken]
        return taken

    def _pays(self, drafted: int, more: float = 1.0) -> bool:
        """Whether the token after `drafted` ones is worth its seconds: all tokens with a confidence are accepted, and
        what no confidence is known of with chance `more`."""
        reach = sum(math.prod(map(self.calibration, row)) for row in zip(*self._confidences, strict=True))
        gain = more * reach / len(self._confidences[0])
        seconds = self.clock.seconds(drafted + 1)
        return gain * self._seconds >= self._emitted * (seconds[drafted + 1] - seconds[drafted])

    def learn(self, rounds: Sequence[Round], seconds: float | None, drafted: int | None = None) -> None:
        """What became of the round: each unfinished row's share, the host's seconds (None where passes were not yet
        captured, which says nothing of later rounds), and the levels that were `drafted`: a draft may give fewer than
        it is asked for; None where it does not."""
        if drafted is not None:
            self.depth = drafted
        if self._confidences:
            self.depth = len(self._confidences)
            self.calibration.learn(rounds, list(zip(*self._confidences, strict=True)))
        if seconds is not None:
            self.clock.learn(self.depth, seconds)
        if self.depth:
            self.acceptance.learn(rounds)
        self._since_plain = self._since_plain + 1 if self.depth else 0
        self._unpriced.append((self.depth, sum(one.emitted for one in rounds) / len(rounds)))
        if self.clock.is_ready:
            self._price()

    def _price(self) -> None:
        """Count rounds by the clock's medians rather than by their own times: a hiccup is nobody's loss."""
        for depth, emitted in self._unpriced:
            times = self.clock.seconds(depth)
            self._emitted = FORGET * self._emitted + emitted
            self._seconds = FORGET * self._seconds + times[depth]
            loss = times[depth] - emitted * times[0] if depth else 0.0
            self._spell += loss
            self._lost = max(0.0, self._lost + loss)
        self._unpriced = []

    def _choose(self, deepest: int) -> int:
        if not deepest:
            return 0
        if not self.clock.is_ready:
            return min(self._first, deepest) if self.clock.knows(0) else 0
        if self._wait:
            self._wait -= 1
            return 0
        seconds, expected = self.clock.seconds(deepest), self.acceptance.expected(deepest)
        rates = [tokens / time for tokens, time in zip(expected, seconds, strict=True)]
        if not self._fallen and self._since_plain >= REFRESH and max(rates) < 2 * rates[0]:
            return 0
        best = max(range(self._fallen, deepest + 1), key=lambda depth: rates[depth] / self._newness(depth))
        if not best or self._lost > PATIENCE * (seconds[-1] - seconds[0]):
            self._fall(seconds[0])
            return 0
        self._fallen = False
        return deepest if self.by_confidence else best

    def _newness(self, depth: int) -> float:
        """A probe is to be cheap, whatever was captured."""
        return 1.0 if self._fallen or self.clock.knows(depth) else NEW_DEPTH

    def _fall(self, plain_s: float) -> None:
        """End a spell of drafting. Its counts weigh no more than a prior from here on, so that a good probe tells."""
        owed = math.ceil(max(0.0, self._spell) / (SLACK * plain_s))
        self._gap = max(1, owed, min(2 * self._gap, LONGEST_GAP) if self._spell > 0 else 0)
        self._wait = self._gap - 1
        self._spell = self._lost = 0.0
        self._fallen = True
        self.acceptance.keep(min(1.0, PRIOR_WEIGHT / max(self.acceptance.tried[0], PRIOR_WEIGHT)))
