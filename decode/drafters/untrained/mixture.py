"""Several drafters together: their guesses share one tree, each as much of it as its guesses have been seen to stand
for. Drafters that read text alone are asked in every round; one with weights where what it adds is worth its time, for
as many tokens as are. Chains end where another token would not pay for its place in the target's pass (`pace`): a
lookup in a text that repeats itself drafts as many as are wanted, and a head beside it the few that it is good for.

Where the verifier judges sampled chains, the member with weights samples, and its q goes along; a row whose chain is
another's has it all on that chain's tokens. Who drafts a row was settled before anything was sampled.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from decode.autotune.budget import REHEARSED
from decode.drafters.base import Context, Drafter
from decode.drafters.drafting import pending_tokens
from decode.drafters.untrained.pace import Offer, Pace, Plan, best_plan, lengths_of
from decode.drafters.untrained.survival import Candidate, SurvivalRates, merged_by_worth
from decode.drafters.untrained.text_drafter import Guess, TextDrafter
from decode.drafters.untrained.trie import as_tree
from decode.drafters.untrained.weighted_member import EXPLORE, Model, asked_of_a_member, with_chains
from decode.trees.tree import Tree
from decode.trees.tree_plans import Shape


class MixtureDrafter(Drafter):
    """`members` in one tree. Of several with weights the one that pays best is asked, where one does."""

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
        self._judged: set[int] = set()
        """Rows in which what `_model` sampled was judged last."""
        self._paces = defaultdict[int, Pace](Pace)
        """By rows of a call."""
        self._plan, self._rehearsed = Plan(0), 0
        self._length, self._plain_rounds, self._drafting_s, self._ended_at = 0, 0, 0.0, 0.0

    def ways(self, shape: Shape) -> int:
        """Each member with weights in each of its own, at each length of the chains."""
        return len(self._lengths_of(shape)) * self._turns(shape)

    def _lengths_of(self, shape: Shape) -> tuple[int, ...]:
        return lengths_of(shape, [one.drafter.drafted_depth(shape) for one in self.models])

    def _turns(self, shape: Shape) -> int:
        """Kinds of rounds of one length."""
        return len(self.models) * max((one.drafter.ways(shape) for one in self.models), default=0) or 1

    def start(self, context: Context, capacity: int) -> None:
        """All begin. Another call may run on a copy of this drafter, so what a call changes is made anew."""
        size = len(context.lengths)
        self._asked, self._lengths, self._ended_at = [[] for _ in range(size)], [0] * size, 0.0
        self._model, self._judged = None, set()
        self.readers = [context.lease.own(one) for one in self.readers]
        self.models = [one.of_call(context) for one in self.models]
        for reader in self.readers:
            reader.start(context, capacity)
        for model in self.models:
            model.member.drafter.start(asked_of_a_member(context), capacity)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        self._ended_at = 0.0  # reading them is no part of a round
        for row, length in lengths.items():
            self._asked[row], self._lengths[row] = [], length
            self._judged.discard(row)
        for reader in self.readers:
            reader.read(context, lengths)
        for model in self.models:
            model.member.read(asked_of_a_member(context), lengths)

    def prepare(self, context: Context) -> tuple[()] | None:
        """See what became of the guesses before, and guess."""
        began = time.perf_counter()
        self._running = list(range(len(self._asked))) if context.running is None else list(context.running)
        lengths = context.lengths.tolist()
        self._note_round(began, context, lengths)
        self._learn(context, lengths)
        self._read_guesses(context)
        if self._model is not None:
            self._model.member.goes_on(self._judged, lengths, context.plain_rounds)
        self._judged = set()
        self._plan = self._chosen(context)
        self._model = None if self._plan.member is None else self.models[self._plan.member]
        if self._model is not None and not self._model.prepare(self._asked_of_model(context), lengths):
            self._model = None
            self._plan = Plan(self._plan.length) if REHEARSED.get() is not None else self._best(context, {})
        self._length, self._ended_at = 0, time.perf_counter()
        self._drafting_s = self._ended_at - began
        return () if self._plan.length else None

    def propose(self, context: Context) -> Tree:
        """What is likeliest to stand of all guesses."""
        began, sampled, number = time.perf_counter(), None, -1
        shape = context.shape.cut(self._plan.length)
        if self._model is not None:
            number = len(self.readers) + self.models.index(self._model)
            guesses, sampled = self._model.guesses(self._asked_of_model(context))
            self._add(number, guesses)
        tries = [merged_by_worth(own, shape.num_nodes, shape.is_chain) for own in self._asked]
        tree = as_tree(tries, pending_tokens(context), shape)
        if sampled is not None:
            tree = self._with_sampled(tree, sampled, number)
        for reader in self.readers:
            tree = reader.with_passengers(tree)
        self._length, self._ended_at = tree.max_depth, time.perf_counter()
        self._drafting_s += self._ended_at - began
        return tree

    def _with_sampled(self, tree: Tree, sampled: Tree, number: int) -> Tree:
        """The rows of which the member `number` drafts the most have what it `sampled`."""
        length = tree.max_depth
        best = {row: max(self._asked[row], key=lambda one: one.worth(length)).kind[0] for row in self._running}
        self._judged = {row for row, member in best.items() if member == number}
        others = [row for row in self._running if row not in self._judged]
        for row in others:  # a sampled token that differs from the text says little of what would have stood
            self._asked[row] = [one for one in self._asked[row] if one.kind[0] != number]
        return with_chains(sampled, tree.tokens, others) if self._judged else tree

    def _asked_of_model(self, context: Context) -> Context:
        return replace(context, shape=context.shape.cut(self._plan.depth)) if context.shape.is_chain else context

    def _note_round(self, now: float, context: Context, lengths: Sequence[int]) -> None:
        """What the round before took and brought; nothing where several have gone by, the call begins, or passes were
        not yet captured, which says nothing of later rounds."""
        declined = 0 if self._length else self._plain_rounds + 1
        is_one = context.plain_rounds == declined and context.target is not None and context.target.replayed
        self._plain_rounds = context.plain_rounds
        if self._ended_at and (is_one or context.target is None):  # of a drafter within a draft nobody counts rounds
            rest_s, pace = now - self._ended_at, self._paces[len(self._asked)]
            pace.time(self._length, rest_s)
            emitted = sum(lengths[row] - self._lengths[row] for row in self._running)
            pace.earn(emitted, rest_s + self._drafting_s)

    def _learn(self, context: Context, lengths: Sequence[int]) -> None:
        for row in self._running:
            written = context.ids[row, self._lengths[row] : lengths[row]].tolist()
            for one in self._asked[row] if REHEARSED.get() is None else ():  # one text, over and over
                self._standing[one.kind].learn(one.tokens, written)
                if one.kind[0] >= len(self.readers):  # a text is always asked for all that it has
                    self._standing[one.kind].forget_beyond(len(one.tokens))
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

    def _chosen(self, context: Context) -> Plan:
        """The coming round's: the best one, or one of a member with weights that has not been asked for long."""
        if REHEARSED.get() is not None:
            return self._rehearsed_plan(context)
        offers = {number: self._offer(number, context) for number in range(len(self.models))}
        waited = [number for number, one in enumerate(self.models) if one.waited() > EXPLORE]
        if not waited:
            return self._best(context, offers)
        plan, free = self._best(context, {waited[0]: offers[waited[0]]}, alone=True), self._best(context, {})
        return replace(plan, length=max(plan.length, free.length))

    def _rehearsed_plan(self, context: Context) -> Plan:
        turn, self._rehearsed = self._rehearsed, self._rehearsed + 1
        lengths, shape = self._lengths_in(context), context.shape
        length = lengths[turn // self._turns(shape) % len(lengths)]
        if not self.models:
            return Plan(length)
        member = turn % len(self.models)
        return Plan(length, member, self.models[member].drafter.drafted_depth(shape.cut(length)))

    def _lengths_in(self, context: Context) -> tuple[int, ...]:
        """A cascade takes the guesses of its helper whole."""
        return self._lengths_of(context.shape) if context.target is not None else (context.shape.depth,)

    def _best(self, context: Context, offers: Mapping[int, Offer], alone: bool = False) -> Plan:
        """That of most worth; of a member with weights `alone`, as if there were no guesses, one with its tokens."""
        lengths, pace = self._lengths_in(context), self._paces[len(self._asked)]
        texts = [[] if alone else [one.chances for one in self._asked[row]] for row in self._running]
        rests, price, least = pace.rests(lengths[-1]), pace.price, min(lengths)
        if rests is None:
            rests = [0.0] * (lengths[-1] + 1)
            if len(lengths) > 1:  # as much as there is, then as little, and their times are known
                lengths, price = (least,) if pace.has_timed else lengths, 0.0
        plan = best_plan(texts, offers, rests, price, lengths, cut=context.shape.is_chain)
        if alone and plan.member is None:
            (member,) = offers
            return Plan(least, member, self.models[member].drafter.drafted_depth(context.shape.cut(least)))
        return Plan(least) if self.most_passengers and not plan.length else plan

    def _offer(self, number: int, context: Context) -> Offer:
        model = self.models[number]
        depth = model.drafter.drafted_depth(context.shape)
        return Offer(self._standing[len(self.readers) + number, 0].chances(depth), model.seconds(depth))
