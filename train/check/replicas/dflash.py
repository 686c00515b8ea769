"""DFlash: a few Qwen3 layers over a block [token, mask, mask, ...], all of whose slots see each other (`causal`: those
before them) and what the target's states of the tokens before make keys and values of. Slot k drafts the k-th token."""

from __future__ import annotations

import torch
from torch import Tensor

from train.check.replicas.base import Around, Served, attend, untouched

_AT_ONCE = 16
"""Blocks of a pass: attention is over all their slots."""


def dflash(served: Served, ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
    """See `train.check.replicas.base.Replica`."""
    states = blocks(served, ids, features, places, served.fields["block_size"])[:, 1 : steps + 1]
    return served.widened(served.logits(states.transpose(0, 1)))


def blocks(
    served: Served, ids: Tensor, features: Tensor, places: Tensor, slots: int, around: Around = untouched
) -> Tensor:
    """(N, slots, d) final states of the blocks behind the tokens at `places`, each by itself."""
    context = served.norm(served.linear(features.flatten(1), "fc"), "hidden_norm")
    return torch.cat([_blocks(served, ids, context, some, slots, around) for some in places.split(_AT_ONCE)])


def _blocks(served: Served, ids: Tensor, context: Tensor, places: Tensor, slots: int, around: Around) -> Tensor:
    before, number = torch.arange(len(context)), len(places)
    own = (places[:, None] + torch.arange(slots)).flatten()
    masks = served.mask.expand(number, slots - 1, -1)
    x = torch.cat([served.embed(ids[places])[:, None], masks], 1).flatten(0, 1)
    visible = _visible(served, before, places, slots)
    for name in (f"layers.{layer}" for layer in range(served.fields["num_hidden_layers"])):
        normed, made = around(served, served.norm(x, f"{name}.input_layernorm"), f"{name}.attention", slots)
        queries = served.heads(normed, name, "q", own)
        parts = [(context, before), (normed, own)]
        keys = [served.heads(one, name, "k", at) for one, at in parts]
        values = [served.split(one, f"{name}.self_attn.v_proj", "num_key_value_heads") for one, _ in parts]
        mixed = attend(queries, torch.cat(keys, 1), torch.cat(values, 1), visible)
        x = x + made(served.linear(mixed, f"{name}.self_attn.o_proj"))
        normed, made = around(served, served.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp", slots)
        x = x + made(served.mlp(normed, name))
    return served.norm(x, "norm").unflatten(0, (number, slots))


def _visible(served: Served, before: Tensor, places: Tensor, slots: int) -> Tensor:
    """(N * slots, T + N * slots) the tokens before a block, and its own slots."""
    block = torch.arange(len(places)).repeat_interleave(slots)
    same = block[:, None] == block
    if served.fields.get("is_causal", (served.fields.get("dflash_config") or {}).get("causal")):
        same = same.tril()
    return torch.cat([before < places[block][:, None], same], 1)
