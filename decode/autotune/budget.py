"""How much to draft in a round: what pays best by the acceptance and the seconds seen so far, and nothing where nothing
pays.

Length: before a round, k in 0..k_max with the highest E(k)/t(k); k = 0 is a plain autoregressive round. Of a tree, k is
the number of levels kept. E(k) starts from what calls before found and follows the call's own text from there; t(k) is
what rounds like these took, in this call and those before (`Experience`). Where no k beats 0, rounds are plain and one
in a while probes (`Fallback`).

Lag: a loop may launch rounds before it has read those before. So a choice rests on what has been learned by then, what
is learned names its own depth, and after a probe rounds are plain until its outcome is known.

Confidence: a draft that predicts what becomes of its tokens (DSpark) ends a round itself. One more draft token is taken
while the gain it promises, P(this far accepted and the next as well), beats what the seconds t(j + 1) - t(j) are worth
at the rate of tokens of the last rounds (the optimal stopping rule of a renewal process: its long-run rate is the price
of a second). A switch of its own, because it asks the host, which rules out a lag.

Exactness: what is chosen before a round looks at earlier rounds only. Inside one the draft is asked about a token by
what is known before it is drawn: a stopping time, under which rejection and block verification keep their distribution,
even though the whole block is drafted as one unit and cut afterwards, and no token is verified that was not expected to
pay. Coupled is exact whatever is looked at. The chances are calibrated here, since they were learned at temperature 1
and of rejection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

from torch import nn

from decode.autotune.estimates import PRIOR_WEIGHT, Acceptance
from decode.autotune.experience import Experience
from decode.drafters.base import Drafter
from decode.forward.runner import rounded
from decode.stats import Round
from decode.trees.tree_plans import Shape

if TYPE_CHECKING:
    from decode.requests import Request

LONG_RUN = 80.0  # tokens of the last rounds that outweigh, in a call, the long run of it and of those before
LEAST = 0.02  # acceptance that a call before may leave as a start, so that a text that can be drafted shows
DOUBT = 0.975  # times the plain rate below which drafting ends: near it nothing is lost, and only drafting teaches
NEW_DEPTH = 1.05  # times the best rate in use that a new depth must promise: its passes are yet to be captured
REHEARSED: ContextVar[int | None] = ContextVar("depth that every round of a warm-up takes", default=None)
REFRESH = 32  # rounds, at least, after which a depth that is not in use is timed again
REFRESH_COST = 0.002  # of the time that this may take, a depth


class Budget:
    """The draft lengths of one call; `depth` is the deepest round that is wanted and that the draft can draft.
    `by_confidence`: a round that drafts at all may go that deep, and ends where `takes` says. What it learns goes to
    `experience`, for calls to come."""

    def __init__(self, depth: int, by_confidence: bool = False, experience: Experience | None = None) -> None:
        self.by_confidence = by_confidence
        self.experience = Experience(depth) if experience is None else experience
        self.depth = 0
        """Levels wanted of the last round."""
        self._deepest, self._first = depth, (depth + 1) // 2
        self._confidences: list[list[float]] = []
        self._ahead = self._unheard = 0
        self._begin()

    @classmethod
    def of(cls, drafter: Drafter, model: nn.Module, request: Request, num_rows: int, capacity: int) -> Budget:
        """That of a call of `num_rows` rows at once, `capacity` slots each, with what calls like it have learned."""
        depth, slots = drafter.drafted_depth(request.shape), rounded(capacity)
        costs = (num_rows, slots, bool(request.processors), request.strict, request.confidence)
        rule = (request.verifier, request.replacement, request.sampling, request.shape)
        return cls(depth, request.confidence, Experience.of(drafter, model, (costs, rule), depth))

    def _begin(self) -> None:
        """From what calls before found."""
        self.acceptance = Acceptance([])
        self._is_doubted = False
        self._recall()
        if self.experience.clock.is_ready:
            rates = self._rates(self._deepest)
            if max(rates) > rates[0]:
                self.experience.fallback.end()

    def _recall(self) -> None:
        """The long run is what the last rounds are weighed against, which weighs the more the more of it there is."""
        kept, counts = self.experience.acceptance, self.acceptance
        weight = min(LONG_RUN, PRIOR_WEIGHT + sum(kept.tried[:1]))
        self.acceptance = Acceptance([max(LEAST, one) for one in kept.estimates()], weight)
        if counts.prior:
            self.acceptance.tried, self.acceptance.taken = counts.tried, counts.taken

    def _rates(self, deepest: int) -> list[float]:
        """Tokens a second by depth, as far as is known."""
        pairs = zip(self.acceptance.expected(deepest), self.experience.clock.seconds(deepest), strict=True)
        return [tokens / seconds for tokens, seconds in pairs]

    def next_shape(self, shape: Shape, left: int) -> Shape:
        """The coming round's cut of `shape`; plain where no row can emit more than `left` = 1 token."""
        with self.experience.lock:
            self.depth = self._choose(min(shape.depth, self._deepest) if left > 1 else 0)
            self.experience.note(self.depth)
            self._confidences = []
            self._ahead += 1
            if self.experience.fallback.is_fallen and self.depth:
                self._unheard = self._ahead
            return shape.cut(self.depth)

    def takes(self, chance: Sequence[float], drafted: int) -> bool:
        """Whether to draw one more token after `drafted` ones: `chance` (rows that have not ended,) is what the draft
        predicts of it, from tokens in the tree by now. The first one always is: its pass has been paid for."""
        self._confidences = [*self._confidences[:drafted], list(chance)]
        taken = not drafted or not self.experience.clock.is_ready or self._pays(drafted)
        self._confidences = self._confidences[: drafted + taken]
        return taken

    def _pays(self, drafted: int) -> bool:
        """Whether the token after `drafted` ones is worth its seconds, by P(it and all before it are accepted)."""
        with self.experience.lock:
            chances = [[self.experience.calibration(one) for one in row] for row in self._confidences]
            seconds = self.experience.clock.seconds(drafted + 1)
            emitted, spent = self.experience.fallback.rate
        gain = sum(map(math.prod, zip(*chances, strict=True))) / len(chances[0])
        return gain * spent >= emitted * (seconds[drafted + 1] - seconds[drafted])

    def learn(self, rounds: Sequence[Round], seconds: float | None, drafted: int) -> None:
        """What became of the oldest round not learned of: each unfinished row's share, the host's seconds (None where
        passes were not yet captured, which says nothing of later rounds), and the levels that were `drafted`: a draft
        may give fewer than it is asked for. Without rounds nothing is learned: all rows had been given to others."""
        with self.experience.lock:
            if self._unheard == 1:
                self.experience.fallback.end()
            self._ahead, self._unheard = max(0, self._ahead - 1), max(0, self._unheard - 1)
            if not rounds:
                return
            if self._confidences:
                drafted = len(self._confidences)
                self.experience.calibration.learn(rounds, list(zip(*self._confidences, strict=True)))
            self.experience.learn(rounds, seconds, drafted)
            if drafted:
                self.acceptance.learn(rounds)
            if drafted and not self._is_doubted:
                self._recall()

    def _choose(self, deepest: int) -> int:
        clock, fallback = self.experience.clock, self.experience.fallback
        rehearsed = REHEARSED.get()
        if rehearsed is not None:
            return min(rehearsed, deepest)
        if not deepest or self._unheard:
            return 0
        if not clock.is_ready:
            return min(self._first, deepest) if clock.knows(0) else 0
        if fallback.waits():
            return 0
        seconds, rates = clock.seconds(deepest), self._rates(deepest)
        best = max(range(1, deepest + 1), key=lambda depth: rates[depth] / self._newness(depth))
        if not fallback.is_fallen and (rates[best] < DOUBT * rates[0] or fallback.is_losing(seconds)):
            fallback.fall(seconds[0])
            self._doubt()
            return 0
        if fallback.is_fallen:
            return best
        chosen = range(1) if self.by_confidence else range(deepest + 1)  # confidence ends rounds at all other depths
        stale = self.experience.stale(rates, chosen, REFRESH, REFRESH_COST)
        if stale is not None:
            return stale
        return deepest if self.by_confidence else best

    def _newness(self, depth: int) -> float:
        """A probe is to be cheap, whatever was captured."""
        return 1.0 if self.experience.fallback.is_fallen or self.experience.clock.knows(depth) else NEW_DEPTH

    def _doubt(self) -> None:
        """What was accepted so far weighs no more than a guess from here on, so that a good probe tells."""
        found = [max(LEAST, one) for one in self.acceptance.estimates()]
        self.acceptance, self._is_doubted = Acceptance(found, PRIOR_WEIGHT), True
