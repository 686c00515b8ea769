"""A member with weights in a mixture: what it is asked, what it takes, and rows whose chains are another's."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decode.drafters.base import Context, Drafter
from decode.drafters.untrained.member import Member
from decode.drafters.untrained.pace import Times
from decode.drafters.untrained.survival import paths
from decode.drafters.untrained.trie import ANY
from decode.trees.tree import Tree, chain_parents
from decode.trees.tree_plans import comb

EXPLORE = 16
"""Rounds after which a member that was not worth its time is asked again."""


class Model:
    """A member with weights, whose passes take time."""

    member: Member
    """In the call that runs."""

    def __init__(self, drafter: Drafter, times: dict[int, Times] | None = None, idle: int = EXPLORE) -> None:
        self.drafter, self._idle = drafter, idle
        self._times = defaultdict[int, Times](lambda: Times(min)) if times is None else times
        """By rows of a call, and tokens drafted. The least counts: prompts that were behind are no part of later
        rounds."""
        self._rows, self._prepared_s = 0, 0.0

    def of_call(self, context: Context) -> Model:
        """For another call, with what is known of its times."""
        one = Model(self.drafter, self._times, self._idle)
        one.member, one._rows = Member(self.drafter, context), len(context.lengths)
        return one

    def seconds(self, depth: int) -> list[float]:
        """That 0, 1, ... `depth` tokens take."""
        return [0.0, *self._times[self._rows].up_to(depth)[1:]]

    def waited(self) -> int:
        """Count one more round since it was last asked, and how many those are."""
        self._idle += 1
        return self._idle

    def prepare(self, context: Context, lengths: Sequence[int]) -> bool:
        """Whether it can draft now."""
        began, self._idle = time.perf_counter(), 0
        prepared = self.member.prepare(asked_of_a_member(context), lengths) is not None
        self._prepared_s = time.perf_counter() - began
        return prepared

    def guesses(self, context: Context) -> tuple[list[list[list[int]]], Tree | None]:
        """A chain a row, and the second best first token; or chains alone, with their q, where they are sampled."""
        began = time.perf_counter()
        tree = self.member.drafter.propose(asked_of_a_member(context))
        rows, parents = tree.tokens.tolist(), tree.parents_of_rows()
        if getattr(getattr(self.member.drafter, "runner", None), "replayed", True):  # passes as they are later on
            self._times[self._rows].learn(tree.max_depth, self._prepared_s + time.perf_counter() - began)
        found = [paths(tokens, above) for tokens, above in zip(rows, parents, strict=True)]
        return found, tree if tree.log_q is not None else None


def asked_of_a_member(context: Context) -> Context:
    """What is asked of a member with weights: a chain and a second first token. Of a tree a draft LM reads before its
    first pass as many tokens as a round can have written. Chains that are to be sampled stay what they are."""
    if context.shape.is_chain and context.drawn == "iid" and not context.sampling.is_greedy:
        return replace(context, budget=None)
    shape = comb([2] + [1] * (context.shape.depth - 1)) if context.shape.depth else context.shape
    return replace(context, shape=shape, drawn="arbitrary", budget=None)


def with_chains(sampled: Tree, tokens: Tensor, rows: Sequence[int]) -> Tree:
    """`sampled`, whose `rows` have those of tokens (B, N) in place of their own, as drawn from a point mass: so is what
    lies behind the end of a shorter chain."""
    if not rows:
        return sampled
    assert sampled.log_q is not None
    assert sampled.rest is None, "hidden states of other tokens"
    size, index = sampled.num_nodes, torch.tensor(rows, device=tokens.device)
    longer = tokens.clone()
    longer[:, :size] = sampled.tokens
    longer[:, size:] = ANY
    longer[index] = tokens[index]
    children = torch.cat([longer[:, 1:], longer[:, -1:]], 1)[..., None]
    log_q = sampled.log_q.new_full((*longer.shape, sampled.log_q.shape[-1]), -torch.inf).scatter_(-1, children, 0.0)
    own = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device).index_fill_(0, index, value=False)
    last = size if size == tokens.shape[1] else size - 1
    log_q[own, :last] = sampled.log_q[own, :last]
    return replace(sampled, tokens=longer, parents=chain_parents(longer.shape[1]), log_q=log_q)
