"""Known bugs of speculative decoders as patches of ours, put back one at a time: the named check must notice each.

That the checks pass without a bug is what the other tests say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from decode.drafters import drafting
from decode.loop import Loop
from decode.rounds.state import State
from decode.sampling.noise import Noise, Stream
from decode.trees.tree import Tree
from decode.verify import block, rejection, verdict
from decode.verify.verdict import Question, Verdict, draw, follow
from tests.decode import checks, overlapped
from tests.decode import mutants_of_lookup as lookup
from tests.decode import mutants_of_passes as passes
from tests.decode import test_attention as window
from tests.decode import test_grammar as grammar
from tests.decode import test_torchao_schemes as torchao_schemes
from tests.decode.untrained import test_early_exit as early_exit
from tests.decode.untrained import test_foreign as foreign
from tests.decode.untrained import test_jacobi as jacobi
from tests.decode.untrained import test_lookup as texts
from tests.decode.untrained import test_mixture as mixture
from tests.tiers import spread

Patch = Callable[[pytest.MonkeyPatch], None]
real_plan, real_block, real_noise = rejection.node_plan, block.plan, drafting.draft_noise
real_children = verdict.children_of


# rules


def non_strict(patch: pytest.MonkeyPatch) -> None:
    """gpt-fast, transformers: a uniform of exactly 0 accepts a token of probability 0."""
    patch.setattr(rejection, "accepts", lambda u, p_drafted, q_drafted: u * q_drafted <= p_drafted)


def resample_on_mismatch(patch: pytest.MonkeyPatch) -> None:
    """REST, Medusa's nucleus mode: the sample that refused the draft is thrown away and another one drawn."""

    def mutant(tree, scores, pick):  # noqa: ANN001, ANN202
        told = follow(tree, scores, pick)
        n, k = told.num_accepted[:, None], tree.max_depth
        again = torch.where(n < k, (told.tokens.gather(1, n) + 1) % checks.VOCAB, told.tokens.gather(1, n))
        return replace(told, tokens=told.tokens.scatter(1, n, again))

    patch.setattr(verdict, "follow", mutant)


def one_more_accepted(patch: pytest.MonkeyPatch) -> None:
    """The first wrong token is taken along."""

    def mutant(tree, scores, pick):  # noqa: ANN001, ANN202
        told = follow(tree, scores, pick)
        more = (told.num_accepted + 1).clamp(max=tree.max_depth)
        path = torch.minimum(torch.arange(tree.num_nodes), more[:, None])
        last = told.tokens.gather(1, more[:, None])[:, 0]
        return verdict.stopped(tree, path, more, last)

    patch.setattr(verdict, "follow", mutant)


def stale_q(patch: pytest.MonkeyPatch) -> None:
    """q of the first node is used for all of them."""
    patch.setattr(
        rejection,
        "node_plan",
        lambda p, q, *rest: real_plan(p, q[:, :1].expand_as(q) if q.dim() == 3 else q, *rest),
    )


def q_keeps_refused_siblings(patch: pytest.MonkeyPatch) -> None:
    """Drafts without replacement, q as before: TV 0.6 on a toy."""
    patch.setattr(rejection, "node_plan", lambda p, q, drafted, present, swor: real_plan(p, q, drafted, present, False))


def missing_residual(patch: pytest.MonkeyPatch) -> None:
    """After the last refusal the token is drawn from p instead of (p - q)+."""

    def mutant(p, q, *rest):  # noqa: ANN001, ANN202
        return replace(real_plan(p, q, *rest), residual=p)

    patch.setattr(rejection, "node_plan", mutant)


def siblings_tried_with_all_of_p(patch: pytest.MonkeyPatch) -> None:
    """A refused sibling takes nothing out of p before the next one is tried."""

    def mutant(p, q, drafted, *rest):  # noqa: ANN001, ANN202
        plan = real_plan(p, q, drafted, *rest)
        return replace(plan, p_drafted=torch.where(plan.p_drafted > 0, p.gather(-1, drafted), 0.0))

    patch.setattr(rejection, "node_plan", mutant)


def residual_of_another_node(patch: pytest.MonkeyPatch) -> None:
    """Off by one: the distribution after the next token."""
    patch.setattr(rejection, "at", lambda values, node: verdict.at(values, (node + 1).clamp(max=values.shape[1] - 1)))


def lucky_pad(patch: pytest.MonkeyPatch) -> None:
    """Medusa, REST: a node with fewer children than others is given pads, and one of them is accepted."""
    patch.setattr(
        rejection,
        "node_plan",
        lambda p, q, drafted, present, swor: real_plan(p, q, drafted, torch.ones_like(present), swor),
    )


def fillers_are_tried(patch: pytest.MonkeyPatch) -> None:
    """Where q has fewer tokens than children are asked for, the others pass `u * q < p` at q = 0."""

    def mutant(p, q, drafted, present, swor):  # noqa: ANN001, ANN202
        plan = real_plan(p, q, drafted, present, swor)
        never_drawn = present & (q.gather(-1, drafted) == 0)
        return replace(
            plan,
            p_drafted=torch.where(never_drawn, p.gather(-1, drafted), plan.p_drafted),
            q_drafted=torch.where(never_drawn, 1e-30, plan.q_drafted),
        )

    patch.setattr(rejection, "node_plan", mutant)


def children_in_order_of_value(patch: pytest.MonkeyPatch) -> None:
    """Siblings are tried by their token instead of in the order in which they were drawn."""

    def mutant(tree: Tree, node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        children, present = real_children(tree, node, depth)
        order = torch.where(present, tree.tokens.gather(1, children), 10**6).argsort(1)
        return children.gather(1, order), present.gather(1, order)

    patch.setattr(rejection, "children_of", mutant)


def duplicates_tried_again(patch: pytest.MonkeyPatch) -> None:
    """Every copy of a candidate gets a sample of p of its own: REST draws anew for every path."""

    def mutant(tree: Tree, scores: Tensor, u: Tensor) -> Verdict:
        told = follow(tree, scores, lambda rows, depths: draw(rows.softmax(-1), u[:, depths]))
        twice = follow(tree, scores, lambda rows, depths: draw(rows.softmax(-1), 1 - u[:, depths]))
        better = (twice.num_accepted > told.num_accepted)[:, None]
        first, second = ((one.path, one.tokens) for one in (told, twice))
        accepted = torch.maximum(told.num_accepted, twice.num_accepted)
        path, tokens = (torch.where(better, b, a) for a, b in zip(first, second, strict=True))
        return Verdict(path, accepted, tokens)

    patch.setattr(rejection, "delta", mutant)


def block_without_the_minimum(patch: pytest.MonkeyPatch) -> None:
    """The running product of p/q is capped at its end, not at every step."""
    patch.setattr(block, "running_minimum", lambda ratio: ratio.cumprod(-1).clamp(max=1))


def block_with_the_residual_of_rejection(patch: pytest.MonkeyPatch) -> None:
    """(p - q)+ instead of (r p - q)+: the part of p that the block has already spent comes again."""

    def mutant(tree: Tree, scores: Tensor) -> block.BlockPlan:
        plan = real_block(tree, scores)
        assert tree.log_q is not None
        p, q = scores.softmax(-1), tree.log_q.exp()
        left = rejection.normalised((p - q).clamp(min=0))
        return replace(plan, residual=torch.cat([left[:, :-1], p[:, -1:]], 1))

    patch.setattr(block, "plan", mutant)


def first_refusal_ends_the_block(patch: pytest.MonkeyPatch) -> None:
    """Block verification's stops walked as if they were acceptances one by one."""

    def mutant(tree: Tree, plan: block.BlockPlan, u: Tensor) -> rejection.Walk:
        accepted = (u < plan.stop).long().cumprod(-1).sum(-1)
        path = torch.minimum(torch.arange(tree.num_nodes), accepted[:, None])
        return rejection.Walk(path, accepted, verdict.at(plan.residual, accepted))

    patch.setattr(block, "walk", mutant)


def draw_off_the_support(patch: pytest.MonkeyPatch) -> None:
    """A uniform that rounds to 1 draws the last token of the vocabulary, whatever its probability."""

    def mutant(distribution: Tensor, u: Tensor) -> Tensor:
        token = torch.searchsorted(distribution.cumsum(-1), u[..., None], right=True)[..., 0]
        return token.clamp(max=distribution.shape[-1] - 1)

    patch.setattr(checks, "draw", mutant)


# randomness


def argmax_drafts(patch: pytest.MonkeyPatch) -> None:
    """transformers' Gemma-4 path: drafts are argmaxes, verified with q as if sampled."""
    patch.setattr(
        drafting, "draw", lambda scores, noise, drawn: (scores.argmax(-1, keepdim=True), scores.log_softmax(-1))
    )


def draft_noise_of_one_round(patch: pytest.MonkeyPatch) -> None:
    """Sequoia: draft noise is drawn once and read in every round."""
    first = torch.zeros((), dtype=torch.long)
    patch.setattr(
        drafting,
        "draft_noise",
        lambda context: real_noise(replace(context, noise=replace(context.noise, round_index=first))),
    )


def accept_noise_of_one_round(patch: pytest.MonkeyPatch) -> None:
    """Sequoia as well: so are the uniforms that accept."""

    def uniforms(self, stream, draws):  # noqa: ANN001, ANN202
        first = replace(self.noise, round_index=torch.zeros((), dtype=torch.long))
        return first.fresh_uniform(stream, torch.zeros(len(self.positions), len(draws)).long(), torch.tensor([*draws]))

    patch.setattr(Question, "uniforms", uniforms)


def streams_shared(patch: pytest.MonkeyPatch) -> None:
    """vLLM 47386: recovery noise equals draft noise."""
    fresh = Noise._fresh_keys
    patch.setattr(
        Noise,
        "_fresh_keys",
        lambda self, stream, at, draws=None: fresh(self, Stream.DRAFT, at, draws),
    )


def siblings_share_a_number(patch: pytest.MonkeyPatch) -> None:
    """Draws are keyed by position and round, not by node."""
    patch.setattr(
        Question,
        "uniforms",
        lambda self, stream, draws: self.noise.fresh_uniform(stream, self.positions[:, :1].expand(-1, len(draws))),
    )


def noise_position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The noise of a draft pass is that of the next position."""
    real = State.positions
    patch.setattr(State, "positions", lambda self, depth: real(self, depth) + (1 if depth else 0))


def noise_keyed_by_row(patch: pytest.MonkeyPatch) -> None:
    """The row of the batch keys the noise, not the request."""
    patch.setattr(Loop, "_key", lambda self, index: self.rows.seated.index(index))


# grammars


def grammar_does_not_take_back(patch: pytest.MonkeyPatch) -> None:
    """The matcher goes on from the path that it was on."""
    patch.setattr("xgrammar.GrammarMatcher.rollback", lambda self, tokens=1: None)


def grammar_of_drafts_alone(patch: pytest.MonkeyPatch) -> None:
    """Drafts are masked, and the target's own tokens are free (arXiv 2605.07698)."""
    patch.setattr("decode.sampling.processors.History.of_tree", lambda self, tree, logits: logits)


MUTANTS: dict[str, tuple[Patch, Callable[[], None]]] = {
    "<= for <": (non_strict, checks.check_zero_probability_never_accepted),
    "re-sample on mismatch": (resample_on_mismatch, checks.check_oracle),
    "first wrong token accepted": (one_more_accepted, checks.check_oracle),
    "stale q": (stale_q, lambda: checks.check_distribution("chain")),
    "q keeps refused siblings": (q_keeps_refused_siblings, lambda: checks.check_distribution("swor tree")),
    "missing residual": (missing_residual, lambda: checks.check_distribution("chain")),
    "missing residual of a tree": (missing_residual, lambda: checks.check_distribution("swor rows")),
    "siblings tried with all of p": (siblings_tried_with_all_of_p, lambda: checks.check_distribution("iid tree")),
    "residual of another node": (residual_of_another_node, lambda: checks.check_distribution("chain")),
    "lucky pad token": (lucky_pad, lambda: checks.check_distribution("swor tree")),
    "children that were not drawn": (fillers_are_tried, checks.check_more_siblings_than_tokens),
    "children in order of value": (children_in_order_of_value, lambda: checks.check_distribution("swor siblings")),
    "duplicates tried again": (duplicates_tried_again, checks.check_delta_distribution),
    "block without the minimum": (block_without_the_minimum, lambda: checks.check_distribution("block")),
    "block with rejection's residual": (
        block_with_the_residual_of_rejection,
        lambda: checks.check_distribution("block"),
    ),
    "first refusal ends the block": (first_refusal_ends_the_block, lambda: checks.check_distribution("block")),
    "draw off the support": (draw_off_the_support, checks.check_draws),
    "argmax drafts verified with q": (argmax_drafts, checks.check_drafts_follow_their_distribution),
    "draft noise reused in every round": (draft_noise_of_one_round, checks.check_noise_is_read_once),
    "accept noise reused in every round": (accept_noise_of_one_round, checks.check_noise_is_read_once),
    "recovery noise is draft noise": (streams_shared, checks.check_streams_differ),
    "siblings share a number": (siblings_share_a_number, checks.check_siblings_have_numbers_of_their_own),
    "off-by-one noise": (noise_position_off_by_one, checks.check_oracle),
    "noise keyed by the row of the batch": (noise_keyed_by_row, checks.check_batches),
    "filters not applied to p": (passes.filters_forgotten, checks.check_filtered_tokens_never_emitted),
    "off-by-one position": (passes.position_off_by_one, checks.check_oracle),
    "window counted in slots": (passes.positions_by_slot, checks.check_sliding_window),
    "window one too wide": (
        passes.window_one_too_wide,
        partial(window.test_a_token_counts_where_it_is_a_sink_or_in_the_window, window.WINDOW),
    ),
    "window of decoding alone": (passes.window_of_decoding_alone, partial(window.check_draft_model, "chain")),
    "window of a head in slots": (passes.window_of_a_head_in_slots, partial(window.check_eagle3, "tree")),
    "steps of training stand still": (passes.steps_of_training_stand_still, partial(window.check_eagle3, "chain")),
    "one scale for a pass": (passes.one_scale_for_a_pass, torchao_schemes.check_rows_apart),
    "unmasked sibling": (passes.siblings_see_each_other, lambda: checks.check_oracle("tree")),
    "accepted path not compacted": (passes.path_not_compacted, lambda: checks.check_cache("tree")),
    "stale slots visible": (passes.stale_slot_visible, checks.check_cache),
    "one slot too many": (passes.one_slot_too_many, checks.check_cache),
    "bucket one slot short": (passes.bucket_one_short, checks.check_long_context),
    "end token inside the path": (passes.end_token_inside_the_path, checks.check_end_of_text),
    "prefix in node order": (passes.prefix_of_another_node, checks.check_processors),
    "prefix without drafts": (passes.prefix_of_the_root, checks.check_processors),
    "last draft token unread": (passes.last_draft_token_unread, checks.check_perfect_draft),
    "draft keeps the row before": (passes.draft_keeps_the_row_before, checks.check_perfect_draft),
    "oldest match": (lookup.oldest_match, texts.test_of_equal_matches_the_last_one_counts),
    "split state without a place": (lookup.split_state_without_a_place, texts.test_a_split_keeps_its_place),
    "guess one token late": (lookup.one_token_late, texts.test_what_followed_the_longest_match_is_guessed_first),
    "guesses hang from pending": (lookup.guesses_hang_from_pending, texts.test_guesses_that_begin_alike_share_nodes),
    "texts of the memory run together": (lookup.texts_run_together, texts.test_memory_is_of_ended_requests),
    "row looks up the text before": (lookup.row_keeps_the_text_before, texts.test_each_request_has_a_text_of_its_own),
    "renamed once": (lookup.renamed_once, texts.test_what_was_renamed_is_drafted_as_it_was_renamed),
    "cascade goes on with the guess": (lookup.parted_row_goes_on_with_the_guess, mixture.check_rounds),
    "foreign draft keeps what was refused": (lookup.draft_keeps_what_was_refused, foreign.check_drafts),
    "half a character is text": (lookup.half_a_character, foreign.check_spelled),
    "grammar does not take back": (grammar_does_not_take_back, grammar.check_answers),
    "grammar of drafts alone": (grammar_of_drafts_alone, grammar.check_answers),
    "n-grams found by their second token": (
        lookup.pool_keyed_by_what_follows,
        jacobi.test_n_grams_are_found_by_their_first_token_and_for_their_place_first,
    ),
    "window of the row before": (lookup.window_of_the_row_before, jacobi.check_windows),
    "window left behind": (lookup.window_left_behind, jacobi.check_windows),
    "row keeps the window before": (lookup.row_keeps_the_text_before, jacobi.check_windows),
    "window without noise": (lookup.window_without_noise, jacobi.check_windows),
    "nodes see passengers": (lookup.nodes_see_passengers, jacobi.check_text),
    "passengers stay in the cache": (lookup.passengers_stay, jacobi.check_text),
    "early layers read twice": (passes.early_layers_read_twice, early_exit.check_each_layer_reads_each_token_once),
    "last draft token unread by early layers": (passes.last_token_unread_below, early_exit.check_text),
    "resumed a layer late": (passes.resumed_a_layer_late, early_exit.check_text),
    "adapter in place": (passes.adapter_in_place, early_exit.check_text_of_adapter),
    "adapter left out": (passes.adapter_left_out, early_exit.check_parity),
    "adapter learns the token after": (passes.adapter_learns_the_token_after, early_exit.check_parity),
    "stale rounds used": (passes.stale_rounds_used, overlapped.check_text),
    "bonus token not compared": (passes.bonus_not_compared, overlapped.check_text),
    "noise of the next round": (passes.noise_of_the_next_round, overlapped.check_noise),
    "distributions not shifted": (passes.distributions_not_shifted, overlapped.check_distributions),
    "likeliest tokens ahead": (passes.likeliest_tokens_ahead, overlapped.check_draws),
    "member keeps what it drafted": (lookup.member_keeps_what_it_drafted, mixture.check_members_read),
}


@pytest.mark.parametrize("name", spread(16, MUTANTS))
def test_known_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, check = MUTANTS[name]
    patch(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):  # torch refuses an index out of bounds by RuntimeError
        check()
