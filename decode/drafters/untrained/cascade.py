"""A drafter for the draft: what it guesses is checked by the draft LM in one pass, where the LM alone takes a pass a
token (hierarchical speculation: Chen et al. 2024, "Cascade Speculative Drafting", arXiv:2312.11462).

The tokens are those that the LM alone drafts with the same noise, whatever is guessed: so a cascade is as exact as its
draft, and by induction at any depth. It pays where a pass of the LM costs much beside a lookup.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from decode.autotune.budget import REHEARSED
from decode.drafters.base import Context, Drafter
from decode.drafters.drafting import Processed, propose_steps
from decode.drafters.lm import LMDraft
from decode.drafters.lm_steps import LMSteps, PassByPass, of_tokens
from decode.drafters.untrained.member import Member
from decode.forward.target import CachedModel
from decode.trees.tree import Tree
from decode.trees.tree_plans import Shape, chain

READ = 2
"""Committed tokens that the first pass reads: in a chain the last draft token may be unread (`drafters.lm`)."""


class CascadeDrafter(Drafter):
    """Chains of `draft`, guessed by `helper`: any drafter that needs no hidden states, another cascade included."""

    family = "cascade"
    on_host = True

    def __init__(self, draft: LMDraft, helper: Drafter) -> None:
        assert not helper.taps, "hidden states are the target's, and the helper drafts for the draft"
        assert not helper.most_passengers, "passengers ride in the target's passes"
        self.draft, self.helper = draft, helper
        self._member: Member | None = None
        self._guesses = self._guessed = False

    def ways(self, shape: Shape) -> int:
        """Rounds with a guess, of each of the helper's kinds, and rounds without: a warm-up takes them in turn."""
        return 2 * self.helper.ways(shape)

    @property
    def runner(self) -> CachedModel:
        """The draft LM's."""
        return self.draft.runner

    def start(self, context: Context, capacity: int) -> None:
        self.draft = context.lease.own(self.draft)
        self._member = Member(self.helper, _helping(context))
        self.draft.start(_in_chains(context), capacity)
        self._member.drafter.start(_helping(context), capacity)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        assert self._member is not None
        self.draft.read(_in_chains(context), lengths)
        self._member.read(_helping(context), lengths)

    def prepare(self, context: Context) -> tuple[()] | None:
        assert self._member is not None
        guesses = self._member.prepare(_helping(context), context.lengths.tolist()) is not None
        self._guesses = guesses and not (REHEARSED.get() is not None and self._guessed)
        return None if self.draft.prepare(_in_chains(context)) is None else ()

    def propose(self, context: Context) -> Tree:
        """The chain that the draft alone would propose."""
        assert self._member is not None
        self._guessed = self._guesses  # where it drafts: it may be asked more often, as a helper
        guess = self._member.drafter.propose(_helping(context)).tokens[:, 1:] if self._guesses else None
        context = _in_chains(context)
        if guess is None or guess.shape[1] < context.shape.depth or context.shortest < READ:
            return self.draft.propose(context)
        places = context.lengths[:, None] - READ + torch.arange(READ, device=context.ids.device)
        passes = PassByPass(self.draft.runner, context.lengths[:, None], context.longest)
        steps = Guessed(passes, context.ids.gather(1, places), guess, self.draft.tokens)
        return propose_steps(Processed(steps, context, self.runner), context)


class Guessed:
    """The draft's passes over a chain whose tokens were guessed: one over all guesses, then one a token from where a
    row's own tokens part from them."""

    def __init__(self, passes: PassByPass, read: Tensor, guess: Tensor, tokens: int | None = None) -> None:
        self._passes, self._guess = passes, guess
        self._alone = LMSteps(passes, read, passes.ends, tokens)
        self._seen = torch.cat([read, guess[:, :-1]], 1)
        self._logits: Tensor | None = None
        self._parted = torch.zeros(len(guess), dtype=torch.bool, device=guess.device)
        self.num_passes = 0

    def first(self) -> Tensor:
        """(B, 1, V) at pending, and the pass that makes all others."""
        logits = self._passes.chain(self._seen, -READ)[:, READ - 1 :]
        self._logits = of_tokens(logits, self._alone.tokens)
        self.num_passes += 1
        return self._logits[:, :1]

    def step(self, tokens: Tensor, depth: int, above: object | None = None) -> Tensor:
        """(B, 1, V) at the token of this depth, tokens (B, 1)."""
        assert self._logits is not None
        self._parted |= tokens[:, 0] != self._guess[:, depth - 1]
        guessed = self._logits[:, depth : depth + 1]
        if not self._parted.any():
            return guessed
        self.num_passes += 1
        return torch.where(self._parted[:, None, None], self._alone.step(tokens, depth), guessed)


def _in_chains(context: Context) -> Context:
    """What is asked of the draft: one candidate everywhere, however wide the tree that is wanted."""
    drawn = "iid" if context.drawn == "swor" else context.drawn
    return replace(context, shape=chain(context.shape.depth), drawn=drawn)


def _helping(context: Context) -> Context:
    """What is asked of the helper: tokens, drawn in any way."""
    return replace(context, shape=chain(context.shape.depth), drawn="arbitrary", budget=None, target=None)
