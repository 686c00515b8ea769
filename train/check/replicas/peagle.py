"""P-EAGLE: EAGLE-3's layer and Llama's behind it, over the true slots and, in step s > 0, a mask s places behind each,
which sees the true slots up to its own and its own masks of the steps before."""

from __future__ import annotations

import torch
from torch import Tensor

from train.check.replicas.base import Served, attended
from train.check.replicas.eagle3 import fused


def peagle(served: Served, ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
    """See `train.check.replicas.base.Replica`."""
    count, made = len(ids), []
    learned = fused(served, served.weights["mask_hidden"].view(1, features.shape[1], -1))
    known: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(served.fields["num_hidden_layers"])]
    for step in range(steps):
        state = learned.expand(count, -1) if step else fused(served, features)
        embedded = served.mask.expand(count, -1) if step else served.embed(ids.roll(-1))
        for number, of_layer in enumerate(known):
            layer, residual = f"layers.{number}", state
            read = served.norm(embedded if number == 0 else state, f"{layer}.input_layernorm")
            if number == 0:
                normed = served.norm(state, f"{layer}.hidden_norm")
                read = torch.cat([read, normed], -1)
                residual = normed if served.fields.get("norm_before_residual") else state
            state = residual + attended(served, read, layer, of_layer)
            state = state + served.mlp(served.norm(state, f"{layer}.post_attention_layernorm"), layer)
        made.append(served.widened(served.logits(served.norm(state, "norm")[places - 1])))
    return torch.stack(made)
