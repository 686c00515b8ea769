"""Where the blocks of DSpark's training lie in packed rows: behind which tokens, what they draft, and what they see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decode.drafters.base import Batch


@dataclass(frozen=True)
class Blocks:
    """M blocks in each of B rows, which draft N tokens by S slots. A block knows its anchor, token a, alone of what it
    stands for, and drafts the tokens a + 1 ... a + N."""

    anchors: Tensor
    """(B, M) int64 places in the row."""
    tokens: Tensor
    """(B, M, N) the token before each drafted one."""
    rows: Tensor
    """(B, M, N) flat row b*T + a + k whose p judges the drafted token."""
    valid: Tensor
    """(B, M, N) bool: this token and those drafted before it belong to the anchor's document and are to be learned."""
    positions: Tensor
    """(B, M, S) of the slots, inside the document."""
    document: Tensor
    """(B, T) of the batch."""
    causal: bool
    """Whether a slot sees those of its block before it alone."""

    @classmethod
    def of(cls, batch: Batch, count: int, depth: int, slots: int, *, causal: bool, at_random: bool) -> Blocks:
        """M = `count` blocks a row, or one for each of its T tokens where those are fewer, of N = `depth` tokens by S =
        `slots`."""
        eligible = batch.next_token_rows()
        num_rows, length = eligible.shape
        anchors, are_chosen = chosen_anchors(eligible, count, at_random)
        places = anchors[..., None] + torch.arange(depth, device=anchors.device)
        inside = places.clamp(max=length - 1).flatten(1)  # what lies behind the end is never valid
        learned = eligible.gather(1, inside).view(places.shape) & (places < length)
        first = torch.arange(num_rows, device=anchors.device)[:, None] * length
        starts = batch.positions.gather(1, anchors)[..., None]
        return cls(
            anchors,
            tokens=batch.ids.gather(1, inside).view(places.shape),
            rows=(first + inside).view(places.shape),
            valid=are_chosen[..., None] & learned.cumprod(-1).bool(),
            positions=starts + torch.arange(slots, device=anchors.device),
            document=batch.document,
            causal=causal,
        )

    @property
    def visible(self) -> Tensor:
        """(B, M * S, T + M * S) bool: a slot sees the tokens of its document before the anchor, which it has as its
        input, and the slots of its own block."""
        num_blocks, size = self.positions.shape[1:]
        order = torch.arange(self.document.shape[1], device=self.anchors.device)
        same = self.document[:, None] == self.document.gather(1, self.anchors)[..., None]  # (B, M, T)
        context = (same & (order < self.anchors[..., None])).repeat_interleave(size, 1)
        block = torch.arange(num_blocks, device=order.device).repeat_interleave(size)
        own = block[:, None] == block
        own = own.tril() if self.causal else own
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
