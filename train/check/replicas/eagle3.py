"""EAGLE-3: one Llama layer over [embedding; state], applied to its own output.

Slot t holds the target's states after token t, and token t + 1. In step s it carries on from its own output of the step
before, with token t + 1 + s, and sees the true slots up to its own and its own earlier steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.check.replicas.base import Served, attend


def eagle3(served: Served, ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
    """See `train.check.replicas.base.Replica`."""
    count = len(ids)
    causal, own = torch.ones(count, count).tril().bool(), torch.eye(count).bool()
    state, keys, values, made = fused(served, features), [], [], []
    for step in range(steps):
        tokens, positions = ids.roll(-1 - step), torch.arange(count) + step
        both = torch.cat(
            [
                served.norm(served.embed(tokens), "layers.0.input_layernorm"),
                served.norm(state, "layers.0.hidden_norm"),
            ],
            -1,
        )
        queries, new = (served.turned(heads(served, both, kind), positions) for kind in ("q", "k"))
        keys.append(new)
        values.append(served.split(both, "layers.0.self_attn.v_proj", "num_key_value_heads"))
        visible = torch.cat([causal, *[own] * step], 1)
        mixed = attend(queries, torch.cat(keys, 1), torch.cat(values, 1), visible)
        residual = served.norm(state, "layers.0.hidden_norm") if served.fields.get("norm_before_residual") else state
        state = residual + served.linear(mixed, "layers.0.self_attn.o_proj")
        state = state + served.mlp(served.norm(state, "layers.0.post_attention_layernorm"), "layers.0")
        normed = served.norm(state, "norm")
        made.append(served.widened(served.logits(normed[places - 1])))
        state = normed if served.fields.get("norm_output") else state
    return torch.stack(made)


def heads(served: Served, both: Tensor, kind: str, layer: str = "layers.0") -> Tensor:
    """Queries or keys, normed as Qwen3's are where the folder holds such norms."""
    name = f"{layer}.self_attn.{kind}"
    split = served.split(both, f"{name}_proj", "num_attention_heads" if kind == "q" else "num_key_value_heads")
    return served.norm(split, f"{name}_norm") if f"{name}_norm.weight" in served.weights else split


def fused(served: Served, features: Tensor) -> Tensor:
    """features (T, n, d) -> (T, d), states in the order in which the engine hands them over."""
    if served.fields.get("fc_norm"):
        parts = [served.norm(features[:, one], f"fc_norm.{one}") for one in range(features.shape[1])]
        features = torch.stack(parts, 1)
    together = features.flatten(1)
    return served.linear(served.norm(together, "input_norm") if served.fields.get("norm_before_fc") else together, "fc")
