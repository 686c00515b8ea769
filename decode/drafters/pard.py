"""PARD (arXiv 2504.18583): a draft language model that drafts all tokens of a round in one pass. Behind the committed
tokens stand masks, one for each token but the first. To draft 3 tokens behind token a:

    [..., a, mask, mask]   the places of a and of the masks draft the tokens a + 1, a + 2 and a + 3

It is a causal model as before, so that fewer masks may be asked for than it was trained with, and it drafts one by one
as well. Its config.json names the mask's token as vLLM reads it (`pard_token`), and how many tokens it was trained to
draft (`pard_depth`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from decode.common.errors import InputError
from decode.drafters.anchored_blocks import chosen_anchors
from decode.drafters.base import Batch, Context, Step
from decode.drafters.drafting import AtOnce, Steps
from decode.drafters.lm import LMDraft
from decode.drafters.lm_steps import Passes, of_tokens
from decode.forward.attention import layer_masks, packed_visibility
from decode.models.structure import decoder_of

if TYPE_CHECKING:
    from decode.trees.tree import Tree

TOKENS_PER_ANCHOR = 4
"""Of a row in training: behind one of so many tokens masks are put, and its own next token is learned."""


@dataclass(frozen=True)
class Masks:
    """What a config says of them."""

    token: int
    """Whose row of the draft's own embedding is the mask, which is trained as all of it is."""
    depth: int | None = None
    """Tokens that it was trained to draft in a pass; None is not known."""

    def written(self) -> dict[str, int | None]:
        """As fields of config.json."""
        return {"pard_token": self.token, "pard_depth": self.depth}


def masks_in(config: PretrainedConfig, path: str = "") -> Masks | None:
    """Those of a model, None of one that drafts one by one; InputError where the token is none of its own."""
    text = config.get_text_config()
    token, depth = getattr(text, "pard_token", None), getattr(text, "pard_depth", None)
    if token is None:
        return None
    sound = [isinstance(one, int) and not isinstance(one, bool) for one in (token, depth or 1)]
    if not all(sound) or not 0 <= token < text.vocab_size or (depth is not None and depth < 1):
        raise InputError(
            f"{path or 'a model'}: its config.json says pard_token={token!r} and pard_depth={depth!r}; they are a "
            f"token below vocab_size={text.vocab_size}, and a whole number of at least 1. Copy its folder again"
        )
    return Masks(token, depth)


def set_masks(config: PretrainedConfig, masks: Masks) -> None:
    """The model of this config has them from now on, and its config.json says so."""
    for name, value in masks.written().items():
        setattr(config.get_text_config(), name, value)


def lm_draft(model: PreTrainedModel, tokens: int | None = None) -> LMDraft:
    """The draft of this model, by its config."""
    masks = masks_in(model.config, model.config.name_or_path or "")
    return LMDraft(model, tokens) if masks is None else PardDraft(model, tokens)


class PardDraft(LMDraft):
    """Both faces; what is read of a text is read as before."""

    family = "pard"
    anchors: int | None = None
    """Of a row in training, None is one for every TOKENS_PER_ANCHOR tokens."""

    def __init__(self, model: PreTrainedModel, tokens: int | None = None) -> None:
        super().__init__(model, tokens)
        masks = masks_in(model.config)
        assert masks is not None
        self.masks, self.most_tokens = masks, masks.depth

    # training face

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """`depth` steps of M anchors a row: step s drafts the token s + 1 places behind each. They are drawn anew in
        every training step, evenly spaced otherwise."""
        depth = self.masks.depth
        assert depth is not None, "a model whose depth is not known is not trained"
        eligible = batch.next_token_rows()
        num_rows, length = eligible.shape
        count = self.anchors or -(-length // TOKENS_PER_ANCHOR)
        anchors, are_chosen = chosen_anchors(eligible, count, self.training)
        hidden = self._hidden_states_at(batch, anchors, depth)
        first = torch.arange(num_rows, device=anchors.device)[:, None] * length
        valid, (head, weights) = are_chosen, self.drafting_head()
        for step in range(depth):
            inside = (anchors + step).clamp(max=length - 1)  # what lies behind the end is never valid
            valid = valid & eligible.gather(1, inside) & (anchors + step < length)
            one, rows = hidden[:, :, step], first + inside
            yield Step(one, head, rows, valid, self.vocab, head_weights=weights, begins_everywhere=False)

    def _hidden_states_at(self, batch: Batch, anchors: Tensor, depth: int) -> Tensor:  # (B, M, depth, d)
        """Final ones of the anchors (B, M) and of the masks behind each."""
        (num_rows, count), device = anchors.shape, anchors.device
        length, size = batch.ids.shape[1], count * (depth - 1)
        ids = torch.cat([batch.ids, batch.ids.new_full((num_rows, size), self.masks.token)], 1)
        starts = batch.positions.gather(1, anchors)[..., None] + torch.arange(1, depth, device=device)
        positions = torch.cat([batch.positions, starts.flatten(1)], 1)
        visible = _visibility(batch.document, anchors, depth)
        masks = layer_masks(self.model.config, visible, positions, positions, self.model.dtype)
        out = decoder_of(self.model)(input_ids=ids, attention_mask=masks, position_ids=positions, use_cache=False)
        hidden = out.last_hidden_state.to(device)
        own = hidden[torch.arange(num_rows, device=device)[:, None], anchors]
        return torch.cat([own[:, :, None], hidden[:, length:].unflatten(1, (count, depth - 1))], 2)

    # decoding face

    def start(self, context: Context, capacity: int) -> None:
        """With room for the masks."""
        super().start(context, capacity + context.shape.depth)

    def prepare(self, context: Context) -> tuple[int, int] | None:
        return super().prepare(self.within_depth(context))

    def width(self, context: Context) -> int:
        """As many tokens as a verdict can have accepted: where they stand there were masks."""
        return context.shape.depth + 1

    def propose(self, context: Context) -> Tree:
        """A chain, or a tree whose nodes of one depth have the same candidates under them."""
        return super().propose(self.within_depth(context))

    def steps(self, context: Context) -> Callable[[Passes, Tensor, Tensor], Steps]:
        """A pass over the tokens not read yet, with a mask behind them for each token but the first."""
        count, mask = context.shape.depth - 1, self.masks.token

        def run(passes: Passes, read: Tensor, ends: Tensor) -> Tensor:
            width = read.shape[1]
            begin = (ends - width).clamp(min=0)
            places = begin + torch.arange(width + count, device=begin.device)
            more = read.new_full((len(read), count), mask)
            # of a row that is shorter than `read` what stands behind its end gives way to masks too
            logits = passes.chain(torch.cat([read, more], 1).where(places < ends, mask), -width)
            index = (ends - 1 - begin) + torch.arange(count + 1, device=begin.device)
            return of_tokens(logits[torch.arange(len(logits), device=logits.device)[:, None], index], self.tokens)

        return lambda *given: AtOnce(partial(run, *given))

    def reach(self, context: Context) -> int:
        return context.shape.depth


def _visibility(document: Tensor, anchors: Tensor, depth: int) -> Tensor:
    """(B, S, S) bool of S = T + M (depth - 1) slots, document (B, T), anchors (B, M): tokens see their document up to
    themselves, masks what their anchor sees and the masks of the same anchor up to their own."""
    text = packed_visibility(document)
    of_anchor = text.gather(1, anchors[..., None].expand(-1, -1, text.shape[2]))  # (B, M, T)
    size, order = anchors.shape[1] * (depth - 1), torch.arange(depth - 1, device=anchors.device)
    block = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(depth - 1)
    place = order.repeat(anchors.shape[1])
    own = (block[:, None] == block) & (place[:, None] >= place)
    none = text.new_zeros(text.shape[0], text.shape[1], size)
    masks = torch.cat([of_anchor.repeat_interleave(depth - 1, 1), own.expand(len(text), -1, -1)], 2)
    return torch.cat([torch.cat([text, none], 2), masks], 1)
