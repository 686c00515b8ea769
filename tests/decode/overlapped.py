"""Models, patches and checks of drafts that are made ahead; tests call them as they are, mutants make them fail."""

from __future__ import annotations

import random
import threading
import time
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.drafters import drafting
from decode.drafters.base import Context, Drafter
from decode.drafters.beside.ahead import AheadDrafter
from decode.drafters.lm import LMDraft
from decode.forward.kept.lease import Lease
from decode.loop import Loop
from decode.requests import Request
from decode.rounds.round import Round
from decode.sampling.noise import Noise
from decode.sampling.warp import Sampling
from decode.trees.tree import Tree
from decode.trees.tree_plans import chain
from tests.decode.checks import audited_run
from tests.tiny import tiny_llama

VOCAB = 64


@cache
def target() -> Any:
    return tiny_llama(VOCAB, dtype=torch.float64).requires_grad_(False)


@cache
def draft(noise: float) -> LMDraft:
    """The target's weights with noise on them: of 0.02 a third of the rounds are guessed, bonus token and all."""
    model, generator = tiny_llama(VOCAB, dtype=torch.float64), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return LMDraft(model)


def threads() -> int:
    """Those that draft ahead."""
    return sum(one.name.startswith("draft-ahead") for one in threading.enumerate())


def delay(patch: pytest.MonkeyPatch, draft_s: float, target_s: float, seed: int | None = None) -> None:
    """Passes of a round take so much longer, or with a seed up to so much."""
    lots, propose, logits = random.Random(seed), LMDraft.propose, Round._logits

    def wait(seconds: float) -> None:
        time.sleep(seconds if seed is None else seconds * lots.random())

    def slow_propose(self: LMDraft, context: Context) -> Tree:
        with self.runner.passes():  # as a pass does: of one lock for all models nothing would be gained
            wait(draft_s)
        return propose(self, context)

    def slow_logits(self: Round, *given: Any) -> Tensor:
        with self.target.passes():
            wait(target_s)
        return logits(self, *given)

    patch.setattr(LMDraft, "propose", slow_propose)
    patch.setattr(Round, "_logits", slow_logits)


class Recorded(AheadDrafter):
    """Keeps what it proposed: the text so far of the one row, the tree, and whether it was drafted ahead."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.proposals: list[tuple[list[int], Tree, bool]] = []

    def propose(self, context: Context) -> Tree:
        """As it does."""
        tree = super().propose(context)
        self.proposals.append((context.ids[0, : int(context.lengths[0])].tolist(), tree, self.begins_ahead))
        return tree


PROMPT = [[5, 9, 1]]


def check_text() -> None:
    """Rounds that were drafted ahead leave the text and the cache alone, whatever the verdict was on the one before."""
    for noise in (0.0, 0.02):
        request = Request(PROMPT, 60, shape=chain(2), seed=1, audit=True)
        plain, _ = Loop(target(), None, Request(PROMPT, 60, shape=chain(0), seed=1)).run()
        tokens, loop = audited_run(target(), AheadDrafter(draft(noise)), request)
        assert tokens == plain
        ahead = [one.ahead for one in loop.stats.rounds if one.ahead is not None]
        assert any(ahead)
    assert not all(ahead[1:])
    accepted = [one.accepted for one in loop.stats.rounds]
    missed = {before for before, hit in zip(accepted, ahead[1:], strict=False) if not hit}
    assert 2 in missed, "a bonus token that was not the guessed one"
    assert missed & {0, 1}, "a refused draft"


def check_distributions() -> None:
    """Every proposal comes with the distributions that its tokens were drawn from, those of its own prefixes."""
    for verifier in ("rejection", "block"):
        drafter, found = Recorded(draft(0.01)), 0
        Loop(target(), drafter, Request(PROMPT, 60, verifier=verifier, shape=chain(2), audit=True)).run()
        for text, tree, ahead in drafter.proposals:
            ids = torch.tensor([text + tree.tokens[0, 1:].tolist()])
            assert tree.tokens[0, 0] == text[-1]
            assert tree.log_q is not None
            want = draft(0.01).model(ids).logits[0, len(text) - 1 : -1].log_softmax(-1)
            torch.testing.assert_close(tree.log_q[0, :-1], want, rtol=0, atol=1e-9)
            found += ahead
        assert found


def check_noise() -> None:
    """No number is read twice, though rounds that were drafted ahead are drafted anew."""
    for verifier in ("rejection", "block"):
        loop = Loop(
            target(), draft(0.01), Request(PROMPT, 60, verifier=verifier, shape=chain(2), overlap=True, audit=True)
        )
        loop.run()
        assert 0 < (loop.stats.ahead_share or 0) < 1


def check_draws(rows: int = 4000) -> None:
    """Of two tokens ahead the first is the likeliest, which no verdict judges, and the second follows q (G statistic,
    threshold of 1e-9 at 3 degrees)."""
    q = torch.tensor([0.5, 0.3, 0.15, 0.05])
    context = Context(
        ids=torch.zeros(rows, 8, dtype=torch.long),
        lengths=torch.full((rows,), 3),
        shortest=3,
        longest=3,
        sampling=Sampling(),
        temperature=torch.ones(1),
        noise=Noise.of(0, list(range(rows)), 4, torch.device("cpu")),
        shape=chain(2),
        drawn="iid",
        shares_noise=False,
        is_undecided=True,
        lease=Lease(),
    )
    noise = drafting.draft_noise(context)
    assert noise is not None
    first, second = (drafting.draw(q.log().repeat(rows, 1), noise[:, depth], "iid")[0][:, 0] for depth in range(2))
    assert (first == 0).all()
    seen = torch.bincount(second, minlength=4).double()
    assert 2 * (seen * (seen.clamp(min=1) / (q.double() * rows)).log()).sum() < 45
