"""What becomes of guesses: the share of a drafter's guesses that reaches each depth, and which guess that favours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode.drafters.untrained.pace import standing
from decode.drafters.untrained.text_drafter import Guess
from decode.drafters.untrained.trie import Trie

FORGET = 0.97
"""Weight that a guess keeps with every one after it: the last 30 count."""
PRIOR, PRIOR_WEIGHT = 0.5, 2.0
"""Chance that a first token stands, and how many guesses that is worth; of a later one, if those before it stand, it is
what has become known of the one before."""


class SurvivalRates:
    """Of the guesses of one drafter: the share that reaches each depth, as seen so far."""

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

    def forget_beyond(self, depth: int) -> None:
        """Depths that were not asked for come back to what those before say, or a bad start would last for ever."""
        for at in range(depth, len(self._counts)):
            reached, right_here = self._counts[at]
            self._counts[at] = (FORGET * reached, FORGET * right_here)

    def chances(self, depth: int) -> list[float]:
        """P(the first 1, 2, ... `depth` tokens stand)."""
        found, reached, before = list[float](), 1.0, PRIOR
        for at in range(depth):
            tried, stood = self._counts[at] if at < len(self._counts) else (0.0, 0.0)
            before = (stood + before * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
            reached *= before
            found.append(reached)
        return found


@dataclass(frozen=True)
class Candidate:
    """A guess, and what is known of its like."""

    kind: tuple[int, int]
    """(member, strength)."""
    tokens: Guess
    chances: Sequence[float]
    """P(the first 1, 2, ... tokens stand)."""

    def worth(self, length: int) -> float:
        """Tokens of the first `length` ones that are expected to stand."""
        return standing(self.chances, length)


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """From pending, which is left out, to each leaf, the longest first."""
    found: list[list[int]] = [[]]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append([*found[parent], token])
    leaves = [path for node, path in enumerate(found) if node and node not in parents]
    return sorted(leaves, key=len, reverse=True)


def merged_by_worth(candidates: Sequence[Candidate], num_nodes: int, is_chain: bool) -> Trie:
    """The tokens of most chance among all candidates', in one trie; of a chain those of the best candidate."""
    trie = Trie(num_nodes)
    if is_chain:
        best = max(candidates, key=lambda one: one.worth(num_nodes - 1), default=None)
        trie.add(() if best is None else best.tokens)
        return trie
    ranked = [
        (-chance, depth, number)
        for number, one in enumerate(candidates)
        for depth, chance in enumerate(one.chances, start=1)
    ]
    for _, depth, number in sorted(ranked):
        trie.add(candidates[number].tokens[:depth])
        if not trie.room:
            break
    return trie
