"""A target's own MTP layer over [embedding; final hidden state], applied to its own output as EAGLE-3's is."""

from __future__ import annotations

import torch
from torch import Tensor

from train.check.replicas.base import Served, attended


def mtp(served: Served, ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
    """See `train.check.replicas.base.Replica`."""
    layer, state, known, made = "mtp.layers.0", features[:, 0], [], []
    for step in range(steps):
        embedded = served.norm(served.embed(ids.roll(-1 - step)), "mtp.pre_fc_norm_embedding")
        x = served.linear(torch.cat([embedded, served.norm(state, "mtp.pre_fc_norm_hidden")], -1), "mtp.fc")
        x = x + attended(served, served.norm(x, f"{layer}.input_layernorm"), layer, known)
        state = served.norm(x + served.mlp(served.norm(x, f"{layer}.post_attention_layernorm"), layer), "mtp.norm")
        made.append(served.logits(state[places - 1]))
    return torch.stack(made)
