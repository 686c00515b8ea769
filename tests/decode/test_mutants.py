"""Known bugs of speculative decoders, put back one at a time: the named check must notice each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decode import loop, target, verify
from decode.drafters import lm
from decode.noise import Noise, Stream
from decode.tree import ancestors
from tests.decode import checks

Patch = Callable[[pytest.MonkeyPatch], None]
real_plan, real_follow, real_draw = verify.rejection_plan, verify.follow, lm.draw


def _non_strict(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "accepts", lambda u, plan: u * plan.q_drafted <= plan.p_drafted)


def _resample_on_mismatch(patch: pytest.MonkeyPatch) -> None:
    """REST, Medusa's nucleus mode: on a mismatch the sample that refused the draft is thrown away and another one
    drawn."""

    def follow(tree, choice):  # noqa: ANN001, ANN202
        verdict = real_follow(tree, choice)
        n, k = verdict.num_accepted[:, None], tree.max_depth
        again = torch.where(n < k, (verdict.tokens.gather(1, n) + 1) % checks.VOCAB, verdict.tokens.gather(1, n))
        return replace(verdict, tokens=verdict.tokens.scatter(1, n, again))

    patch.setattr(verify, "follow", follow)


def _stale_q(patch: pytest.MonkeyPatch) -> None:
    """q of the first node is used for all of them."""
    patch.setattr(
        verify,
        "rejection_plan",
        lambda log_p, tree: real_plan(log_p, replace(tree, log_q=tree.log_q[:, :1].expand_as(tree.log_q))),
    )


def _argmax_drafts(patch: pytest.MonkeyPatch) -> None:
    """transformers' Gemma-4 path: drafts are argmaxes, verified with q as if sampled."""
    patch.setattr(lm, "draw", lambda scores, context, depth: (scores.argmax(-1, keepdim=True), scores.log_softmax(-1)))


def _draft_noise_of_one_round(patch: pytest.MonkeyPatch) -> None:
    """Sequoia: draft noise is drawn once and read in every round."""
    patch.setattr(lm, "draw", lambda scores, context, depth: real_draw(scores, replace(context, round_index=0), depth))


def _streams_shared(patch: pytest.MonkeyPatch) -> None:
    """vLLM 47386: recovery noise equals draft noise."""
    fresh = Noise._fresh_keys
    patch.setattr(
        Noise,
        "_fresh_keys",
        lambda self, stream, at, round_index, draws=None: fresh(self, Stream.DRAFT, at, round_index, draws),
    )


def _missing_residual(patch: pytest.MonkeyPatch) -> None:
    """After a rejection the token is drawn from p instead of (p - q)+."""
    patch.setattr(verify, "rejection_plan", lambda log_p, tree: replace(real_plan(log_p, tree), residual=log_p.exp()))


def _residual_of_the_next_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        verify,
        "rejection_plan",
        lambda log_p, tree: replace(real_plan(log_p, tree), residual=real_plan(log_p, tree).residual.roll(-1, 1)),
    )


def _position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Draft nodes are read at the position of the token before them."""
    real = target.CachedModel._positions
    patch.setattr(
        target.CachedModel,
        "_positions",
        lambda self, starts, parents: (
            real(self, starts, (-1,) + (0,) * (len(parents) - 1)) if len(parents) == 5 else real(self, starts, parents)
        ),
    )


def _noise_position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The noise of a draft pass is that of the next position."""
    real = loop.Loop._positions
    patch.setattr(
        loop.Loop,
        "_positions",
        lambda self, depth: [[at + 1 for at in row] if depth else row for row in real(self, depth)],
    )


def _siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(target, "ancestors", lambda parents: torch.ones_like(ancestors(parents)).tril())


def _path_not_compacted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(target.CachedModel, "commit", lambda self, starts, path, is_chain: None)


def _stale_slot_visible(patch: pytest.MonkeyPatch) -> None:
    """The mask of a ragged batch is that of its longest row."""
    real = target.CachedModel._visibility
    patch.setattr(
        target.CachedModel,
        "_visibility",
        lambda self, starts, parents: real(self, [max(starts)] * len(starts), parents),
    )


def _one_more_accepted(patch: pytest.MonkeyPatch) -> None:
    """A pad or the first wrong token is taken along."""

    def follow(tree, choice):  # noqa: ANN001, ANN202
        verdict = real_follow(tree, choice)
        more = (verdict.num_accepted + 1).clamp(max=tree.max_depth)
        drafted = torch.cat([tree.tokens[:, 1:], choice[:, -1:]], 1)
        steps = torch.arange(choice.shape[1])
        return replace(verdict, num_accepted=more, tokens=torch.where(steps < more[:, None], drafted, choice))

    patch.setattr(verify, "follow", follow)


def _filters_forgotten(patch: pytest.MonkeyPatch) -> None:
    """p is not warped before the rule."""
    patch.setattr(loop, "warp", lambda logits, sampling: logits)


MUTANTS: dict[str, tuple[Patch, Callable[[], None]]] = {
    "<= for <": (_non_strict, checks.check_zero_probability_never_accepted),
    "re-sample on mismatch": (_resample_on_mismatch, checks.check_oracle),
    "stale q": (_stale_q, checks.check_rejection_law),
    "argmax drafts verified with q": (_argmax_drafts, checks.check_drafts_follow_their_law),
    "draft noise reused in every round": (_draft_noise_of_one_round, checks.check_noise_is_read_once),
    "recovery noise is draft noise": (_streams_shared, checks.check_streams_differ),
    "missing residual": (_missing_residual, checks.check_rejection_law),
    "residual of another node": (_residual_of_the_next_node, checks.check_rejection_law),
    "off-by-one position": (_position_off_by_one, checks.check_oracle),
    "off-by-one noise": (_noise_position_off_by_one, checks.check_oracle),
    "unmasked sibling": (_siblings_see_each_other, lambda: checks.check_oracle("tree")),
    "accepted path not compacted": (_path_not_compacted, lambda: checks.check_cache("tree")),
    "stale slots visible": (_stale_slot_visible, checks.check_cache),
    "first wrong token accepted": (_one_more_accepted, checks.check_oracle),
    "filters not applied to p": (_filters_forgotten, checks.check_filtered_tokens_never_emitted),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_known_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, check = MUTANTS[name]
    check()
    patch(monkeypatch)
    with pytest.raises(AssertionError):
        check()
