"""p and hidden states from the frozen target, run in the training process: exact, and fit for every objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from decode.drafters.base import Batch
from decode.drafters.lm import LMDraft
from decode.models.hidden_states import Taps
from distill.objectives.target_distribution import HiddenRows


class LiveTarget:
    """One forward of a batch gives both; logits are made chunk by chunk, through the head, when asked for."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()) -> None:
        """`model` is frozen and stays outside of the engine: only the draft is prepared."""
        self.reader = LMDraft(model)  # it reads packed rows exactly as a draft does
        self.head, self.layers = self.reader.head, tuple(layers)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        """The same batch with p of every row, and the hidden states of `layers` where there are any."""
        with Taps(self.reader.model, self.layers) as seen:
            hidden = self.reader.hidden_states(batch).flatten(0, 1)
        rows = HiddenRows(hidden, self.head, torch.arange(len(hidden), device=hidden.device))
        features = seen.stacked().to(batch.ids.device) if self.layers else None
        return replace(batch, target=rows, features=features)
