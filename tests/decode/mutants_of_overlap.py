"""Known bugs of drafting ahead as patches of ours; `test_mutants` puts them back one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode.drafters import drafting
from decode.drafters.base import Context
from decode.drafters.beside import ahead
from decode.drafters.beside.ahead import Guess
from decode.sampling.noise import Stream
from decode.trees.tree import Tree

real_noise, real_behind = drafting.draft_noise, ahead._behind_the_first


def stale_rounds_used(patch: pytest.MonkeyPatch) -> None:
    """What was drafted ahead is used whatever was accepted."""
    patch.setattr(Guess, "came_true", lambda self, drafted, context: True)


def bonus_not_compared(patch: pytest.MonkeyPatch) -> None:
    """It is used where all drafts were accepted, whatever the token behind them."""
    patch.setattr(
        Guess,
        "came_true",
        lambda self, drafted, context: bool((context.lengths == self.beyond.lengths + 1).all()),
    )


def noise_of_the_next_round(patch: pytest.MonkeyPatch) -> None:
    """Tokens are drawn ahead with the numbers that the next round draws with where they are dropped."""

    def mutant(context: Context) -> Tensor | None:
        if not context.is_undecided or context.drawn != "iid":
            return real_noise(context)
        following = replace(context.noise, round_index=context.noise.round_index + 1)
        positions = context.lengths[:, None] + torch.arange(context.num_draft_tokens)
        return following.fresh_gumbel(Stream.DRAFT, positions)

    patch.setattr(drafting, "draft_noise", mutant)


def distributions_not_shifted(patch: pytest.MonkeyPatch) -> None:
    """Each token drafted ahead is judged by q of the token before it."""

    def mutant(drafted: Tree) -> Tree:
        found = real_behind(drafted)
        return replace(found, log_q=None if drafted.log_q is None else drafted.log_q[:, :-1])

    patch.setattr(ahead, "_behind_the_first", mutant)


def likeliest_tokens_ahead(patch: pytest.MonkeyPatch) -> None:
    """All tokens ahead are the likeliest, not the guessed one alone, and judged as if drawn."""

    def mutant(context: Context) -> Tensor | None:
        noise = real_noise(context)
        return noise if noise is None or not context.is_undecided else torch.zeros_like(noise)

    patch.setattr(drafting, "draft_noise", mutant)
