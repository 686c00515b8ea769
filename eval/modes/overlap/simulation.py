"""Rounds simulated on two devices: drafting and verification in turn, and drafting ahead while the target verifies.

The clock begins with a verification, and a round lasts until the next one begins. Both ways accept the same tokens.
In turn, the verdict goes to the draft, which drafts k tokens and sends them. Ahead, as `decode.drafters.beside.ahead`
does, the draft goes on as if all k tokens were accepted, and guesses the target's own token too: k + 1 tokens while the
target verifies. Where the verdict of every row is as assumed, the next verification waits for nothing but these. Else
the draft is told once it is through, and drafts anew.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eval.modes.overlap.pairs import Pair


class Rounds(NamedTuple):
    """Of N simulated rounds, by index."""

    tokens: np.ndarray
    """(N,) emitted, mean of the rows."""
    milliseconds: np.ndarray
    """(N,) from one verification to the next."""
    foreseen: np.ndarray
    """(N,) bool: the verdict was as assumed, in every row."""


class Clock:
    """Times that scatter around their means: lognormal, `jitter` their standard deviation as a share of the mean."""

    def __init__(self, rounds: int, jitter: float, generator: np.random.Generator) -> None:
        self.rounds, self.generator = rounds, generator
        self.sigma = np.sqrt(np.log1p(jitter**2))

    def times(self, mean_ms: float) -> np.ndarray:
        """(N,) milliseconds."""
        return mean_ms * self.generator.lognormal(-(self.sigma**2) / 2, self.sigma, self.rounds)


def verdicts(pair: Pair, k: int, rounds: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, foreseen) as in `Rounds`. The target's own token is guessed as often as a draft token there would be
    accepted, which holds under the coupled rule, whose noise the guess shares."""
    drawn = generator.random((rounds, pair.batch_size, k + 1)) < np.array(pair.chances(k + 1))
    taken = np.cumprod(drawn, axis=-1)
    return 1 + taken[..., :k].sum(-1).mean(-1), np.asarray(taken[..., k].all(-1))


def in_turn(pair: Pair, k: int, link_ms: float, jitter: float, rounds: int, seed: int) -> Rounds:
    """k draft tokens, then their verification."""
    generator = np.random.default_rng(seed)
    tokens, foreseen = verdicts(pair, k, rounds, generator)
    clock = Clock(rounds, jitter, generator)
    back, drafting, forth = clock.times(link_ms), clock.times(k * pair.draft_ms), clock.times(link_ms)
    return Rounds(tokens, clock.times(pair.verify_ms(k)) + back + drafting + forth, foreseen)


def ahead(pair: Pair, k: int, link_ms: float, jitter: float, rounds: int, seed: int) -> Rounds:
    """k + 1 tokens drafted during each verification of k."""
    generator = np.random.default_rng(seed)
    tokens, foreseen = verdicts(pair, k, rounds, generator)
    clock = Clock(rounds, jitter, generator)
    verifying, guessing = clock.times(pair.verify_ms(k)), clock.times((k + 1) * pair.draft_ms)
    told, back, forth = (clock.times(link_ms) for _ in range(3))
    as_assumed = np.maximum(verifying, told + guessing + forth)
    anew = np.maximum(verifying + back, told + guessing) + clock.times(k * pair.draft_ms) + forth
    return Rounds(tokens, np.where(foreseen, as_assumed, anew), foreseen)


WAYS = {"in turn": in_turn, "ahead": ahead}
