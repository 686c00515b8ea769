"""How far a quantised target is from the one that it was made of: its text is another model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.acceptance import greedy_agreement, overlap
from eval.prompts.prompt import Prompt


@torch.inference_mode()
def rounding(model: PreTrainedModel, other: PreTrainedModel, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """{"kl", "tv", "argmax_agreement", "positions"} over all positions of the prompts, at temperature 1: mean
    KL(other || model) in nats, mean total variation, and the share of equal argmaxes."""
    sums, positions = torch.zeros(3, dtype=torch.float64), 0
    for prompt in prompts:
        ids = torch.tensor([list(prompt.ids)], device=model.device)
        ours, theirs = (_log_p(one, ids) for one in (model, other))
        kl = (theirs.exp() * (theirs - ours)).sum(-1)
        each = (kl, 1 - overlap(theirs, ours), greedy_agreement(theirs, ours))
        sums += torch.stack([one.sum() for one in each]).double().cpu()
        positions += ids.shape[1]
    kl, tv, same = (sums / positions).tolist()
    return {"kl": kl, "tv": tv, "argmax_agreement": same, "positions": positions}


def _log_p(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits[0].float().log_softmax(-1)
