"""Medusa: residual layers of each head on the target's final hidden state, then an output head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from train.check.replicas.base import Served


def medusa(served: Served, ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
    """See `train.check.replicas.base.Replica`; head s drafts from the state before the last committed token."""
    made = []
    for head in range(steps):
        state, layer = features[places - 1, 0], 0
        while f"blocks.{head}.layers.{layer}.weight" in served.weights:
            state = state + silu(served.linear(state, f"blocks.{head}.layers.{layer}"))
            layer += 1
        shared = served.fields.get("original_lm_head")
        names = ["lm_head.weight", "lm_heads.0.weight"] if shared else [f"lm_heads.{head}.weight"]
        rows = next((served.weights[name] for name in names if name in served.weights), served.head)
        is_whole = served.drafted is not None and len(rows) > len(served.drafted)
        made.append(served.widened(linear(state, rows[served.drafted] if is_whole else rows)))
    return torch.stack(made)
