"""Known bugs of passes, caches, loops and drafting ahead as patches of ours; `test_mutants` names the check of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode.drafters import drafting, exit_adapter, layers, lm, unrolled
from decode.drafters.base import Context, judged
from decode.drafters.beside import ahead
from decode.drafters.beside.ahead import Guess
from decode.drafters.untrained import early_exit
from decode.forward import quantised_linear, target
from decode.forward.window import Window
from decode.rounds.rows import RequestState
from decode.sampling import processors
from decode.sampling.noise import Stream
from decode.trees.tree import Tree

real_masks = target.layer_masks


def filters_forgotten(patch: pytest.MonkeyPatch) -> None:
    """p is not warped before the rule."""
    patch.setattr("decode.rounds.round.warp", lambda logits, sampling, temperature: logits)


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Draft nodes are read at the position of the token before them."""
    real = target.NodePass._over

    def mutant(self, tokens, own, positions, *rest):  # noqa: ANN001, ANN202
        return real(self, tokens, own, torch.cat([positions[:, :1], positions[:, 1:] - 1], 1), *rest)

    patch.setattr(target.NodePass, "_over", mutant)


def positions_by_slot(patch: pytest.MonkeyPatch) -> None:
    """The window of a sliding layer counts slots; nodes of a tree lie in slots beyond their positions."""

    def mutant(config, visible, query, keys, dtype):  # noqa: ANN001, ANN202
        return real_masks(config, visible, query, torch.arange(visible.shape[2]).expand_as(keys), dtype)

    patch.setattr(target, "layer_masks", mutant)


def window_one_too_wide(patch: pytest.MonkeyPatch) -> None:
    """A token sees as many positions before it, and itself besides."""
    patch.setattr(Window, "keeps", lambda self, query, key: (key < self.sinks) | (query - key <= self.size))


def window_of_decoding_alone(patch: pytest.MonkeyPatch) -> None:
    """A draft model is trained on the whole text."""

    def mutant(*given):  # noqa: ANN002, ANN202
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr("decode.forward.attention.own_window", lambda config: None)
            return real_masks(*given)

    patch.setattr(lm, "layer_masks", mutant)


def window_of_a_head_in_slots(patch: pytest.MonkeyPatch) -> None:
    """Siblings push a node out of the window of its own descendants."""

    def mutant(self, first, before, visible):  # noqa: ANN001, ANN202
        places = first[..., None] + torch.arange(visible.shape[-1])
        own = places[..., -visible.shape[1] :].transpose(1, 2)
        return before & self.window.keeps(own, self.slots), visible & self.window.keeps(own, places)

    patch.setattr(layers.Slots, "_near", mutant)


def steps_of_training_stand_still(patch: pytest.MonkeyPatch) -> None:
    """All steps that a slot is unrolled to have the window of the first."""
    real = unrolled.Reach.of

    def mutant(document, positions, window, step):  # noqa: ANN001, ANN202
        return replace(real(document, positions, window, 0), own=[None] * step)

    patch.setattr(unrolled.Reach, "of", mutant)


def one_scale_for_a_pass(patch: pytest.MonkeyPatch) -> None:
    """Activations are rounded to int8 by one scale for all tokens of a pass."""
    patch.setattr(quantised_linear, "largest", lambda flat: flat.abs().amax().expand(len(flat), 1))


def siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    """The mask of a chain under a tree."""
    patch.setattr(Tree, "ancestors", property(lambda tree: torch.ones(1, tree.num_nodes, tree.num_nodes).bool().tril()))


def path_not_compacted(patch: pytest.MonkeyPatch) -> None:
    """Accepted nodes stay where the tree put them."""
    patch.setattr(target.CachedModel, "commit", lambda self, starts, path, is_chain: None)


def stale_slot_visible(patch: pytest.MonkeyPatch) -> None:
    """The mask of a ragged batch is that of its longest row."""
    patch.setattr(
        target,
        "layer_masks",
        lambda config, visible, *rest: real_masks(config, visible.any(0, keepdim=True).expand_as(visible), *rest),
    )


def one_slot_too_many(patch: pytest.MonkeyPatch) -> None:
    """The mask ends one slot late: what a round before left there is seen."""

    def mutant(config, visible, *rest):  # noqa: ANN001, ANN202
        last = visible.any(1).long().cumsum(-1).argmax(-1)  # (B,) the last slot that anyone sees
        more = torch.nn.functional.one_hot((last + 1).clamp(max=visible.shape[2] - 1), visible.shape[2]).bool()
        return real_masks(config, visible | more[:, None], *rest)

    patch.setattr(target, "layer_masks", mutant)


def bucket_one_short(patch: pytest.MonkeyPatch) -> None:
    """The view of the cache is a slot shorter than what a pass writes; bounds of the rows are one longer than they."""
    real = target.CachedModel.visible
    patch.setattr(target.CachedModel, "visible", lambda self, end: real(self, end - 2))


def end_token_inside_the_path(patch: pytest.MonkeyPatch) -> None:
    """EAGLE: tokens behind the end token of an accepted path are returned."""

    def mutant(self, tokens, reason_to_end):  # noqa: ANN001, ANN202
        self.tokens += tokens
        self.reason = reason_to_end(self)
        return len(tokens)

    patch.setattr(RequestState, "extend", mutant)


def prefix_of_another_node(patch: pytest.MonkeyPatch) -> None:
    """Penalties on a tree see the drafted tokens in the order of their nodes."""
    patch.setattr(processors, "path_to", lambda parents, node: list(range(1, node + 1)))


def prefix_of_the_root(patch: pytest.MonkeyPatch) -> None:
    """Penalties see the committed tokens only."""
    patch.setattr(processors, "path_to", lambda parents, node: [])


def last_draft_token_unread(patch: pytest.MonkeyPatch) -> None:
    """After a round that accepted everything the draft goes on without its own last token."""
    patch.setattr(lm.LMDraft, "width", lambda self, context: 1)


def draft_keeps_the_row_before(patch: pytest.MonkeyPatch) -> None:
    """A request that takes over a row is drafted for as if it continued the one before."""
    read = lm.LMDraft.read
    first = lambda self, context, lengths: read(self, context, lengths if len(lengths) > 1 else {})  # noqa: E731
    patch.setattr(lm.LMDraft, "read", first)


def early_layers_read_twice(patch: pytest.MonkeyPatch) -> None:
    """The verdict's pass begins at the first layer again."""
    patch.setattr(early_exit, "Rest", lambda num_lower, unread: None)


def last_token_unread_below(patch: pytest.MonkeyPatch) -> None:
    """The verdict goes on from what an earlier round left in the slot of the last draft token."""
    patch.setattr(early_exit, "LAST", 0)


def adapter_in_place(patch: pytest.MonkeyPatch) -> None:
    """The adapter changes the hidden states that the verdict goes on from."""
    real = exit_adapter.ResidualMLP.forward
    patch.setattr(exit_adapter.ResidualMLP, "forward", lambda self, x: x.copy_(real(self, x)))


def adapter_left_out(patch: pytest.MonkeyPatch) -> None:
    """What is drafted is plain early exit, whatever was learned."""
    real = early_exit.Lower
    patch.setattr(early_exit, "Lower", lambda num_layers, adapter, serial: real(num_layers))


def adapter_learns_the_token_after(patch: pytest.MonkeyPatch) -> None:
    """Rows are judged as those of heads on the final state."""
    patch.setattr(exit_adapter, "judged", lambda batch, ahead: judged(batch, ahead + 1))


def resumed_a_layer_late(patch: pytest.MonkeyPatch) -> None:
    """The layer behind the exit never runs."""
    real = early_exit.Rest
    patch.setattr(early_exit, "Rest", lambda num_lower, unread: real(num_lower + 1, unread))


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
