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
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from decode.autotune.estimates import FORGET, PRIOR_WEIGHT, Acceptance, Calibration, Clock
from decode.stats import Round
from decode.trees.tree_plans import Shape

SLACK = 0.025  # of the autoregressive time may go to probing: half of the 5 % that are promised
LONGEST_GAP = 64  # plain rounds, unless more are owed: text that becomes draftable is noticed by then
PATIENCE = 8.0  # deepest rounds' worth of loss at which drafting ends although the estimates still favour it
NEW_DEPTH = (
    1.05  # times the rate of the best depth in use that a new one must promise: its passes are yet to be captured
)
REFRESH = 32  # rounds after which t(0) is measured again where it decides


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
