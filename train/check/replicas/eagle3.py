"""EAGLE-3: one Llama layer over [embedding; state], applied to its own output.

Slot t holds the target's states after token t, and token t + 1. In step s it carries on from its own output of the step
before, with token t + 1 + s, and sees the true slots up to its own and its own earlier steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.check.replicas.base import Served, attended


def eagle3(served: Served, ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
    """See `train.check.replicas.base.Replica`."""
    state, known, made = fused(served, features), [], []
    for step in range(steps):
        embedded = served.norm(served.embed(ids.roll(-1 - step)), "layers.0.input_layernorm")
        own = served.norm(state, "layers.0.hidden_norm")
        residual = own if served.fields.get("norm_before_residual") else state
        state = residual + attended(served, torch.cat([embedded, own], -1), "layers.0", known)
        state = state + served.mlp(served.norm(state, "layers.0.post_attention_layernorm"), "layers.0")
        normed = served.norm(state, "norm")
        made.append(served.widened(served.logits(normed[places - 1])))
        state = normed if served.fields.get("norm_output") else state
    return torch.stack(made)


def fused(served: Served, features: Tensor) -> Tensor:
    """features (T, n, d) -> (T, d), states in the order in which the engine hands them over."""
    if served.fields.get("fc_norm"):
        parts = [served.norm(features[:, one], f"fc_norm.{one}") for one in range(features.shape[1])]
        features = torch.stack(parts, 1)
    together = features.flatten(1)
    return served.linear(served.norm(together, "input_norm") if served.fields.get("norm_before_fc") else together, "fc")
