"""Several drafters together: their guesses share one tree, each as much of it as its guesses have been seen to stand
for. Drafters that read text alone are asked in every round; one with weights where what it adds is worth its time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from decode.autotune.budget import REHEARSED
from decode.drafters.base import Context, Drafter
from decode.drafters.drafting import pending_tokens
from decode.drafters.untrained.member import Member
from decode.drafters.untrained.text_drafter import Guess, TextDrafter
from decode.drafters.untrained.trie import Trie, as_tree
from decode.trees.tree import Tree
from decode.trees.tree_plans import comb

FORGET = 0.97
"""Weight that a guess keeps with every one after it: the last 30 count."""
PRIOR, PRIOR_WEIGHT = 0.5, 2.0
"""Chance that a token stands if those before it do, and how many guesses that is worth."""


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

    def chances(self, depth: int) -> list[float]:
        """P(the first 1, 2, ... `depth` tokens stand)."""
        found, reached = list[float](), 1.0
        for at in range(depth):
            tried, stood = self._counts[at] if at < len(self._counts) else (0.0, 0.0)
            reached *= (stood + PRIOR * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
            found.append(reached)
        return found


EXPLORE = 16
"""Rounds after which a member that was not worth its time is asked again."""
SLOW = 0.1
"""Weight of the last time in the mean of times."""


@dataclass(frozen=True)
class Candidate:
    """A guess, and what is known of its like."""

    kind: tuple[int, int]
    """(member, strength)."""
    tokens: Guess
    chances: Sequence[float]
    """P(the first 1, 2, ... tokens stand)."""

    @property
    def worth(self) -> float:
        """Tokens that are expected to stand."""
        return sum(self.chances)


class MixtureDrafter(Drafter):
    """`members` in one tree. Of several with weights the first that is worth its time is asked."""

    family = "mixture"
    on_host = True

    def __init__(self, members: Sequence[Drafter]) -> None:
        assert members
        self.readers = [one for one in members if isinstance(one, TextDrafter)]
        self.models = [Model(one) for one in members if not isinstance(one, TextDrafter)]
        self.taps = next((one.drafter.taps for one in self.models if one.drafter.taps), ())
        riding = [one.most_passengers for one in self.readers]
        self.most_passengers = sum(riding)
        assert self.most_passengers in (0, *riding), "passenger logits are of one member's"
        assert not any(one.drafter.most_passengers for one in self.models), "nor of a member's member"
        self._standing: dict[tuple[int, int], SurvivalRates] = defaultdict(SurvivalRates)
        self._asked: list[list[Candidate]] = []
        self._lengths: list[int] = []
        self._running: list[int] = []
        self._model: Model | None = None
        self._rest_s, self._ended_at = 0.0, 0.0

    @property
    def ways(self) -> int:
        """Kinds of rounds with a member with weights, of which each may have several: a warm-up takes them in turn."""
        return len(self.models) * max((one.drafter.ways for one in self.models), default=0) or 1

    def start(self, context: Context, capacity: int) -> None:
        """All begin. Another call may run on a copy of this drafter, so what a call changes is made anew."""
        size = len(context.lengths)
        self._asked, self._lengths, self._ended_at = [[] for _ in range(size)], [0] * size, 0.0
        self.readers = [context.lease.own(one) for one in self.readers]
        self.models = [one.of_call(context) for one in self.models]
        for reader in self.readers:
            reader.start(context, capacity)
        for model in self.models:
            model.member.start(in_a_tree(context), capacity)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """All read the prompts."""
        for row, length in lengths.items():
            self._asked[row], self._lengths[row] = [], length
        for reader in self.readers:
            reader.read(context, lengths)
        for model in self.models:
            model.member.read(in_a_tree(context), lengths)

    def prepare(self, context: Context) -> tuple[()] | None:
        """See what became of the guesses before, and guess."""
        now = time.perf_counter()
        if self._ended_at:
            self._rest_s += (SLOW if self._rest_s else 1.0) * (now - self._ended_at - self._rest_s)
        self._running = list(range(len(self._asked))) if context.running is None else list(context.running)
        lengths = context.lengths.tolist()
        self._learn(context, lengths)
        self._read_guesses(context)
        self._model = self._worth_asking(context)
        if self._model is not None and not self._model.prepare(context, lengths):
            self._model = None
        self._ended_at = time.perf_counter()
        rides = self.most_passengers or REHEARSED.get() is not None
        return () if self._model is not None or any(self._asked) or rides else None

    def propose(self, context: Context) -> Tree:
        """What is likeliest to stand of all guesses."""
        if self._model is not None:
            number = len(self.readers) + self.models.index(self._model)
            self._add(number, self._model.guesses(context))
        shape = context.shape
        tries = [merged_by_worth(own, shape.num_nodes, shape.is_chain) for own in self._asked]
        self._ended_at = time.perf_counter()
        tree = as_tree(tries, pending_tokens(context), shape)
        for reader in self.readers:
            tree = reader.with_passengers(tree)
        return tree

    def _learn(self, context: Context, lengths: Sequence[int]) -> None:
        for row in self._running:
            written = context.ids[row, self._lengths[row] : lengths[row]].tolist()
            for one in self._asked[row]:
                self._standing[one.kind].learn(one.tokens, written)
            self._lengths[row] = lengths[row]

    def _read_guesses(self, context: Context) -> None:
        self._asked = [[] for _ in self._asked]
        for number, member in enumerate(self.readers):
            found = member.guesses(context)
            self._add(number, found, {row: member.strength(row) for row in self._running})

    def _add(self, member: int, guesses: Sequence[Sequence[Guess]], strengths: Mapping[int, int] | None = None) -> None:
        for row in self._running:
            for number, tokens in enumerate(guesses[row]):
                strength = -1 if number else (strengths or {}).get(row, 0)  # those after the first are another kind
                standing = self._standing[member, strength]
                self._asked[row].append(Candidate((member, strength), tokens, standing.chances(len(tokens))))

    def _worth_asking(self, context: Context) -> Model | None:
        """The first member with weights whose tokens are worth its seconds, or one that has not been asked for long."""
        if self.models and REHEARSED.get() is not None:
            return max(self.models, key=Model.rest)
        running = self._running
        without = [max((one.worth for one in self._asked[row]), default=0.0) for row in running]
        for number, model in enumerate(self.models):
            expected = sum(self._standing[len(self.readers) + number, 0].chances(context.shape.depth))
            gain = sum(max(0.0, expected - own) for own in without)
            emitted = len(running) + sum(without)
            if model.rest() > EXPLORE or gain * self._rest_s >= emitted * model.seconds:
                return model
        return None


class Model:
    """A member with weights, whose passes take time."""

    member: Member
    """In the call that runs."""

    def __init__(self, drafter: Drafter, seconds: float = 0.0, idle: int = EXPLORE) -> None:
        self.drafter, self.seconds, self._idle = drafter, seconds, idle

    def of_call(self, context: Context) -> Model:
        """For another call, with what is known of its times."""
        one = Model(self.drafter, self.seconds, self._idle)
        one.member = Member(self.drafter, context)
        return one

    def rest(self) -> int:
        """Rounds since it was last asked, the coming one among them."""
        self._idle += 1
        return self._idle

    def prepare(self, context: Context, lengths: Sequence[int]) -> bool:
        """Whether it can draft now."""
        self._began = time.perf_counter()
        return self.member.prepare(in_a_tree(context), lengths) is not None

    def guesses(self, context: Context) -> list[list[list[int]]]:
        """A chain a row, and the second best first token."""
        tree = self.member.propose(in_a_tree(context))
        rows, parents = tree.tokens.tolist(), tree.parents_of_rows()
        self._idle = 0
        self._note(time.perf_counter() - self._began)
        return [paths(tokens, above) for tokens, above in zip(rows, parents, strict=True)]

    def _note(self, seconds: float) -> None:
        """The least time counts for much: captures and prompts that were behind are no part of later rounds."""
        weight = 1.0 if not self.seconds or seconds < self.seconds else SLOW * min(1.0, self.seconds / seconds)
        self.seconds += weight * (seconds - self.seconds)


def in_a_tree(context: Context) -> Context:
    """What is asked of a member with weights: a chain and a second first token. Of a tree a draft LM reads before its
    first pass as many tokens as a round can have written."""
    shape = comb([2] + [1] * (context.shape.depth - 1)) if context.shape.depth else context.shape
    return replace(context, shape=shape, drawn="arbitrary", budget=None)


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
        candidates = [max(candidates, key=lambda one: one.worth)] if candidates else []
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
