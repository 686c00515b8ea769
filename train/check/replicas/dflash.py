"""DFlash: a few Qwen3 layers over a block [token, mask, mask, ...], all of whose slots see each other (but for `causal`
ones) and what the target's hidden states of the tokens before make keys and values of. Slot k drafts the k-th token,
slot 0 none."""

from __future__ import annotations

import torch
from torch import Tensor

from train.check.replicas.base import Served, attend


def dflash(served: Served, ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
    """See `train.check.replicas.base.Replica`."""
    slots = served.fields["block_size"]
    states = [block(served, ids, features, int(place), slots)[1 : steps + 1] for place in places]
    return served.widened(served.logits(torch.stack(states, 1)))


def block(served: Served, ids: Tensor, features: Tensor, place: int, slots: int) -> Tensor:
    """(slots, d) final states of the block behind the token at `place`."""
    context = served.norm(served.linear(features[:place].flatten(1), "fc"), "hidden_norm")
    before, own = torch.arange(place), torch.arange(place, place + slots)
    x = torch.cat([served.embed(ids[place : place + 1]), served.mask.expand(slots - 1, -1)])
    for layer in range(served.fields["num_hidden_layers"]):
        name = f"layers.{layer}"
        normed = served.norm(x, f"{name}.input_layernorm")
        queries = served.turned(_normed(served, normed, name, "q", "num_attention_heads"), own)
        parts = [(context, before), (normed, own)]
        keys = [served.turned(_normed(served, one, name, "k", "num_key_value_heads"), at) for one, at in parts]
        values = [served.split(one, f"{name}.self_attn.v_proj", "num_key_value_heads") for one, _ in parts]
        visible = torch.ones(slots, place + slots, dtype=torch.bool)
        if (served.fields.get("dflash_config") or {}).get("causal"):
            visible[:, place:] = torch.ones(slots, slots).tril().bool()
        mixed = attend(queries, torch.cat(keys, 1), torch.cat(values, 1), visible)
        x = x + served.linear(mixed, f"{name}.self_attn.o_proj")
        x = x + served.mlp(served.norm(x, f"{name}.post_attention_layernorm"), name)
    return served.norm(x, "norm")


def _normed(served: Served, x: Tensor, layer: str, kind: str, count: str) -> Tensor:
    split = served.split(x, f"{layer}.self_attn.{kind}_proj", count)
    return served.norm(split, f"{layer}.self_attn.{kind}_norm")
