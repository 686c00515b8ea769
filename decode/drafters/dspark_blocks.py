"""Blocks of a draft that fills them in one pass: where training puts them, who sees whom, and their layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decode.drafters.base import Batch
from decode.drafters.head_draft import HeadConfig
from decode.drafters.layers import MLP, Attention, Extend


class BlockLayer(nn.Module):
    """A decoder layer as Qwen3 has it; what it attends to besides its own slots is the business of `extend`."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = Attention(
            width, config.heads, config.kv_heads, config.head_dim, config.rotary(), qk_norm_eps=eps
        )
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = MLP(width, config.mlp_width)

    def forward(self, x: Tensor, positions: Tensor, extend: Extend) -> Tensor:
        """x (B, T, d), positions (B, T) -> (B, T, d)."""
        x = x + self.self_attn(self.input_layernorm(x), positions, extend)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass(frozen=True)
class Blocks:
    """M blocks of S slots in each of B rows. Slot k of the block whose anchor is token a knows token a alone of its
    block, and drafts token a + k + 1."""

    anchors: Tensor
    """(B, M) int64 places in the row."""
    tokens: Tensor
    """(B, M, S) the token before the one that each slot drafts."""
    rows: Tensor
    """(B, M, S) flat row b*T + a + k whose p judges the slot."""
    valid: Tensor
    """(B, M, S) bool: this slot's token and those of the slots before it belong to the anchor's document and are to be
    learned."""
    positions: Tensor
    """(B, M * S) of the slots, inside the document."""
    document: Tensor
    """(B, T) of the batch."""

    @classmethod
    def of(cls, batch: Batch, count: int, size: int, at_random: bool) -> Blocks:
        """`count` blocks a row, or one for each of its T tokens where those are fewer."""
        eligible = batch.next_token_rows()
        num_rows, length = eligible.shape
        anchors, are_chosen = chosen_anchors(eligible, count, at_random)
        places = anchors[..., None] + torch.arange(size, device=anchors.device)
        inside = places.clamp(max=length - 1).flatten(1)  # what lies behind the end is never valid
        learned = eligible.gather(1, inside).view(places.shape) & (places < length)
        first = torch.arange(num_rows, device=anchors.device)[:, None] * length
        starts = batch.positions.gather(1, anchors)[..., None]
        return cls(
            anchors,
            tokens=batch.ids.gather(1, inside).view(places.shape),
            rows=(first + inside).view(places.shape),
            valid=are_chosen[..., None] & learned.cumprod(-1).bool(),
            positions=(starts + torch.arange(size, device=anchors.device)).flatten(1),
            document=batch.document,
        )

    @property
    def visible(self) -> Tensor:
        """(B, M * S, T + M * S) bool: a slot sees the tokens of its document before the anchor, which it has as its
        input, and all slots of its own block."""
        num_blocks, size = self.tokens.shape[1:]
        order = torch.arange(self.document.shape[1], device=self.anchors.device)
        same = self.document[:, None] == self.document.gather(1, self.anchors)[..., None]  # (B, M, T)
        context = (same & (order < self.anchors[..., None])).repeat_interleave(size, 1)
        block = torch.arange(num_blocks, device=order.device).repeat_interleave(size)
        own = block[:, None] == block
        return torch.cat([context, own.expand(len(context), -1, -1)], 2)


def chosen_anchors(eligible: Tensor, count: int, at_random: bool) -> tuple[Tensor, Tensor]:
    """(places (B, M), which of them count (B, M)) of M = min(count, T) of the places that eligible (B, T) marks, all of
    them where a row has no more.

    Random ones come from torch's generator of the CPU, whose state checkpoints keep; the others are evenly spaced, so
    that every validation sees the same ones and training's random numbers stay what they were.
    """
    num_rows, length = eligible.shape
    keys = torch.rand(num_rows, length) if at_random else torch.arange(length).expand(num_rows, -1) / length
    order = (keys.to(eligible.device) + 2 * ~eligible).argsort(-1)
    found = eligible.sum(-1, keepdim=True)
    index = torch.arange(min(count, length), device=eligible.device).expand(num_rows, -1)
    if not at_random:
        index = torch.where(found > index.shape[1], index * found // index.shape[1], index)
    return order.gather(1, index), index < found
