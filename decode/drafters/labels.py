"""What the slots of a batch draft, and by which rows they are judged: slot t knows token t + 1, and drafts from token
t + 2 on."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.drafters.base import Batch


def shifted(ids: Tensor, places: int) -> Tensor:
    """ids (B, T) moved to the left; what comes in at the end belongs to slots that are not valid."""
    return ids.roll(-places, 1)


def judged(batch: Batch, ahead: int) -> tuple[Tensor, Tensor]:
    """(target rows, valid) (B, T) of slots t whose token t + ahead + 1 is drafted: the row before it, and whether it is
    a token of the same document that is to be learned."""
    batch_size, length = batch.ids.shape
    place = torch.arange(length, device=batch.ids.device) + ahead
    last = length - 2  # row and token of a slot whose own lie behind the end, which is not valid
    rows = torch.arange(batch_size, device=place.device)[:, None] * length + place.clamp(max=last)
    token = (place + 1).clamp(max=length - 1)
    same = (batch.document[:, token] == batch.document) & (batch.document >= 0)
    return rows, same & batch.loss_mask[:, token] & (place <= last)
