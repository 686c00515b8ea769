"""Drafts of the shared tokens under rejection and block verification, every draft and throw of the dice enumerated."""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from decode.drafters import drafting
from decode.drafters.base import Context
from decode.drafters.untrained.foreign.drafter import ForeignDrafter
from decode.loop import Loop
from decode.requests import Request
from decode.sampling.warp import Sampling, warp
from decode.trees.tree import Tree, chain_parents
from decode.trees.tree_plans import chain
from tests.decode.distributions import Distribution, blocked, distance, rejected
from tests.decode.untrained.foreign_models import letters, llama, shared

DEPTH = 2
PARENTS = chain_parents(DEPTH + 1)


TARGET, OWN = letters("abc", ["ab", "aa"]), letters("cba", ["bb", "ab", "ba", "cc"])
"""Four tokens are shared, under other numbers; "aa" is the target's alone."""
PROMPT = [0, 2, 1, 4, 1, 3]
SHARED = {0: 2, 1: 1, 2: 0, 3: 4}


class _DraftedError(Exception):
    """Ends the call."""


class Kept(ForeignDrafter):
    """Keeps its first draft and what it read for it."""

    tree: Tree
    text_read: list[int]

    def propose(self, context: Context) -> NoReturn:  # type: ignore[override]
        self.tree = super().propose(context)
        assert self._texts[0] is not None
        self.text_read = self._texts[0]
        assert all(text == self.text_read for text in self._texts)
        raise _DraftedError


def drafted(sampling: Sampling, verifier: str, rows: int) -> Kept:
    """After the draft of `rows` requests of one prompt."""
    drafter = Kept(llama(len(OWN), 3), shared(TARGET, OWN))
    request = Request([PROMPT] * rows, 8, sampling, verifier, chain(DEPTH), batch_size=rows, seed=4)
    with pytest.raises(_DraftedError):
        Loop(llama(len(TARGET)), drafter, request).run()
    return drafter


def log_law(drafter: Kept, sampling: Sampling, tokens: tuple[int, ...]) -> Tensor:
    """(V,) of the token behind these drafted ones, by a pass without a cache: the draft's over the shared tokens alone,
    warped as the target's is."""
    text = drafter.text_read + [SHARED[token] for token in tokens]
    logits = drafter.model(torch.tensor([text])).logits[0, -1]
    ours, theirs = [*SHARED.keys()], [*SHARED.values()]
    few = warp(logits[theirs][None], sampling)[0].log_softmax(-1)
    return torch.full((len(TARGET),), -torch.inf, dtype=torch.float64).index_copy(0, torch.tensor(ours), few)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("top_k", [None, 2, 5])
@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_what_is_written_has_the_targets_distribution(
    verifier: str, top_k: int | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 tokens a filter keeps all, though the draft has but 4: the fifth is of no chance."""
    sampling = Sampling(temperature) if top_k is None else Sampling(temperature, top_k=top_k)
    wanted = torch.tensor([*itertools.product(range(len(TARGET)), repeat=DEPTH)])
    forced = torch.full((len(wanted), DEPTH, len(TARGET)), -torch.inf).scatter(2, wanted[..., None], 0.0).double()
    monkeypatch.setattr(drafting, "draft_noise", lambda context: forced)
    drafter = drafted(sampling, verifier, len(wanted))
    tree = drafter.tree
    assert tree.log_q is not None
    chances = torch.zeros(len(wanted), dtype=torch.float64)
    for row, tokens in enumerate(wanted.tolist()):
        first = log_law(drafter, sampling, ()).exp()
        torch.testing.assert_close(tree.log_q[row, 0].exp(), first)
        if first[tokens[0]] > 0:
            assert int(tree.tokens[row, 1]) == tokens[0]
            second = log_law(drafter, sampling, (tokens[0],)).exp()
            torch.testing.assert_close(tree.log_q[row, 1].exp(), second)
            chances[row] = first[tokens[0]] * second[tokens[1]]
    assert torch.equal(tree.tokens[chances > 0, 1:], wanted[chances > 0])
    assert 0 < int((chances > 0).sum()) <= len(SHARED) ** DEPTH
    torch.testing.assert_close(chances.sum().item(), 1.0)
    torch.testing.assert_close(tree.log_q.logsumexp(-1), torch.zeros(tree.tokens.shape, dtype=torch.float64))
    assert distance(_written(tree, chances, sampling, verifier), _plain(sampling)) < 1e-12


def test_tokens_are_drawn_from_what_the_verifier_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Gumbel trick, of which the noise is known: the largest of log q + noise."""
    noises: list[Tensor] = []
    real = drafting.draft_noise

    def noted(context: Context) -> Tensor | None:
        noise = real(context)
        assert noise is not None
        noises.append(noise)
        return noise

    monkeypatch.setattr(drafting, "draft_noise", noted)
    tree = drafted(Sampling(1.0, top_k=3), "rejection", 40).tree
    assert tree.log_q is not None
    assert torch.equal((tree.log_q[:, :DEPTH] + noises[0]).argmax(-1), tree.tokens[:, 1:])
    assert len(tree.tokens.unique(dim=0)) > 2


def _target_scores(tokens: Tensor, sampling: Sampling) -> Tensor:
    """(B, k + 1, V) log p at the prompt's last token and at tokens (B, k)."""
    ids = torch.cat([torch.tensor([PROMPT] * len(tokens)), tokens], 1)
    logits: Any = llama(len(TARGET))(ids).logits[:, len(PROMPT) - 1 :]
    return warp(logits.flatten(0, 1), sampling).log_softmax(-1).view(logits.shape)


def _plain(sampling: Sampling) -> Distribution:
    """Of the next k + 1 tokens."""
    found = {(): 1.0}
    for _ in range(DEPTH + 1):
        found = _longer(found, sampling)
    return found


def _longer(found: Distribution, sampling: Sampling) -> Distribution:
    more: Distribution = {}
    for tokens, mass in found.items():
        law = _target_scores(torch.tensor([tokens], dtype=torch.long), sampling)[0, -1].exp()
        more |= {(*tokens, token): mass * chance for token, chance in enumerate(law.tolist()) if chance}
    return more


def _written(tree: Tree, chances: Tensor, sampling: Sampling, verifier: str) -> Distribution:
    """Of k + 1 tokens: what a round emits, and the target's own behind that."""
    assert tree.log_q is not None
    keep = chances > 0
    seen = Tree(tree.tokens[keep], PARENTS, "iid", tree.log_q[keep])
    scores = _target_scores(seen.tokens[:, 1:], sampling)
    mass = chances[keep]
    told = rejected(seen, PARENTS, scores, mass) if verifier == "rejection" else blocked(seen, scores, mass)
    found: Distribution = {}
    for length in range(1, DEPTH + 2):
        found = _longer(found, sampling) if found else {}
        for tokens, more in told.items():
            if len(tokens) == length:
                found[tokens] = found.get(tokens, 0.0) + more
    return found
