"""A target's own MTP layer over [embedding; final hidden state], applied to its own output as EAGLE-3's is."""

from __future__ import annotations

import torch
from torch import Tensor

from train.check.replicas.base import Served, attend
from train.check.replicas.eagle3 import heads


def mtp(served: Served, ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
    """See `train.check.replicas.base.Replica`."""
    count, layer = len(ids), "mtp.layers.0"
    causal, own = torch.ones(count, count).tril().bool(), torch.eye(count).bool()
    state, keys, values, made = features[:, 0], [], [], []
    for step in range(steps):
        embedded = served.norm(served.embed(ids.roll(-1 - step)), "mtp.pre_fc_norm_embedding")
        x = served.linear(torch.cat([embedded, served.norm(state, "mtp.pre_fc_norm_hidden")], -1), "mtp.fc")
        read = served.norm(x, f"{layer}.input_layernorm")
        positions = torch.arange(count) + step
        queries, new = (served.turned(heads(served, read, kind, layer), positions) for kind in ("q", "k"))
        keys.append(new)
        values.append(served.split(read, f"{layer}.self_attn.v_proj", "num_key_value_heads"))
        visible = torch.cat([causal, *[own] * step], 1)
        mixed = attend(queries, torch.cat(keys, 1), torch.cat(values, 1), visible)
        x = x + served.linear(mixed, f"{layer}.self_attn.o_proj")
        state = served.norm(x + served.mlp(served.norm(x, f"{layer}.post_attention_layernorm"), layer), "mtp.norm")
        made.append(served.logits(state[places - 1]))
    return torch.stack(made)
