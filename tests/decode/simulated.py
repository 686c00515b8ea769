"""Decoders whose acceptance and clock are scripted, call after call, for tests of how much is drafted."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from decode.autotune.budget import Budget
from decode.autotune.experience import Experience
from decode.stats import Round
from decode.trees.tree_plans import Shape, chain

CAPTURED_AFTER, UNCAPTURED, CAPTURE = 6, 1.6, 8.0
"""Uses of a depth before its round is captured, what one costs until then, and what the capture costs, in rounds."""


@dataclass
class Simulation:
    """Calls of one pair of models, whose budgets share what they learn."""

    seconds: Callable[[int], float]
    """t(depth)."""
    accepts: Callable[[float, int], float]
    """(tokens emitted so far in all calls, position) -> P(the position is accepted | those before were)."""
    shape: Shape = chain(8)
    jitter: float = 0.0
    """A round takes up to so much longer, in shares of its time, and one in a hundred three times as long."""
    lag: int = 0
    """Rounds launched before the first of them is learned of."""
    captures: bool = False
    """Whether rounds have to be captured first."""
    fixed: int | None = None
    """Depth that is always drafted, instead of a budget."""
    seed: int = 0
    spent: float = 0.0
    depths: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """Tokens emitted by the end of each round."""

    def __post_init__(self) -> None:
        self.experience = Experience(self.shape.depth)
        self._uses: Counter[int] = Counter()
        self._rng = random.Random(self.seed)

    def run(self, tokens: int, rows: int = 1) -> Simulation:
        """A call of about `tokens` tokens a row. What is launched beyond its end costs nothing and is not learned."""
        budget, flights, done = Budget(self.shape.depth, experience=self.experience), deque[int](), 0.0
        begun = self.ends[-1] if self.ends else 0.0
        while done < tokens:
            left = math.ceil(tokens - done)
            flights.append(budget.next_shape(self.shape, left).depth if self.fixed is None else self.fixed * (left > 1))
            if len(flights) <= self.lag:
                continue
            depth = flights.popleft()
            outcomes = [self._accepted(begun + done, depth) for _ in range(rows)]
            took, captured = self._took(depth)
            self.spent += took
            done += sum(outcomes) / rows + 1
            self.depths.append(depth)
            self.ends.append(begun + done)
            if self.fixed is not None:
                continue
            rounds = [Round(row, depth, one, one + 1) for row, one in enumerate(outcomes)]
            budget.learn(rounds, took if captured else None, depth)
        return self

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.ends[-1] / self.spent

    def _took(self, depth: int) -> tuple[float, bool]:
        rng = self._rng
        took = self.seconds(depth) * (1 + self.jitter * rng.random())
        took *= 3 if self.jitter and rng.random() < 0.01 else 1
        self._uses[depth] += 1
        if not self.captures or self._uses[depth] > CAPTURED_AFTER:
            return took, True
        return took * (UNCAPTURED + (CAPTURE if self._uses[depth] == CAPTURED_AFTER else 0)), False

    def _accepted(self, done: float, depth: int) -> int:
        accepted = 0
        while accepted < depth and self._rng.random() < self.accepts(done, accepted):
            accepted += 1
        return accepted


def line(step: float, base: float = 0.0) -> Callable[[int], float]:
    """A plain round costs 1, a draft token `step`, drafting at all `base`."""
    return lambda depth: 1.0 + (base if depth else 0.0) + step * depth


def best_depth(accept: list[float], seconds: Callable[[int], float]) -> int:
    """argmax E(k)/t(k) with everything known."""
    expected = [1.0]
    reach = 1.0
    for one in accept:
        reach *= one
        expected.append(expected[-1] + reach)
    return max(range(len(expected)), key=lambda depth: expected[depth] / seconds(depth))
