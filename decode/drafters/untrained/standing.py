"""How far the guesses of a drafter stand, as they are seen to: the share of those that reach each depth."""

from __future__ import annotations

from collections.abc import Sequence

FORGET = 0.97
"""Weight that a guess keeps with every one after it: the last 30 count."""
PRIOR, PRIOR_WEIGHT = 0.5, 2.0
"""Chance that a token stands if those before it do, and how many guesses that is worth."""


class Standing:
    """Of guesses of one kind."""

    def __init__(self) -> None:
        self._counts: list[tuple[float, float]] = []  # by depth: guesses that reached it, and those that stood there

    def learn(self, guess: Sequence[int], written: Sequence[int]) -> None:
        """What was guessed, and what came: tokens behind the last one that was written are neither right nor wrong,
        unless one before them was wrong."""
        right = next((i for i, (one, other) in enumerate(zip(guess, written, strict=False)) if one != other), None)
        known = len(guess) if right is not None else min(len(guess), len(written))
        stood = known if right is None else right
        for depth in range(known):
            if depth > stood:
                break  # of those that reach this depth alone
            if depth == len(self._counts):
                self._counts.append((0.0, 0.0))
            reached, right_here = self._counts[depth]
            self._counts[depth] = (FORGET * reached + 1, FORGET * right_here + (depth < stood))

    def chances(self, depth: int) -> list[float]:
        """P(the first 1, 2, ... `depth` tokens stand)."""
        found, reached = list[float](), 1.0
        for at in range(depth):
            tried, stood = self._counts[at] if at < len(self._counts) else (0.0, 0.0)
            reached *= (stood + PRIOR * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
            found.append(reached)
        return found
