"""p from the frozen target, run in the training process: exact, and fit for every objective."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from decode.drafters.base import Batch
from decode.drafters.lm import LMDraft
from distill.distribution import HiddenRows


class LiveTarget:
    """Hidden states of a batch as a distribution; logits are made chunk by chunk, through the head, when asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` is frozen and stays outside of the engine: only the draft is prepared."""
        self.reader = LMDraft(model)  # it reads packed rows exactly as a draft does
        self.head = self.reader.head

    @torch.no_grad()
    def __call__(self, batch: Batch) -> HiddenRows:
        hidden = self.reader.hidden_states(batch).flatten(0, 1)
        return HiddenRows(hidden, self.head, torch.arange(len(hidden), device=hidden.device))
