"""DFlash2: DFlash's block with a convolution over its slots before and after attention and MLP, and a choice among the
best tokens of each slot by the token before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from train.check.replicas.base import Served, tokens_before
from train.check.replicas.dflash import blocks


def dflash2(served: Served, ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
    """See `train.check.replicas.base.Replica`; -inf for what is no candidate."""
    states = blocks(served, ids, features, places, served.fields["block_size"], convolved)[:, 1 : steps + 1]
    states = states.transpose(0, 1)
    logits, weights = served.logits(states), served.weights
    known = weights["candidate_selector.predecessor_codebook"][tokens_before(ids, places, steps)]
    known = known * served.linear(states, "candidate_selector.hidden_projection")
    every = logits + known @ weights["candidate_selector.successor_codebook"].T
    least = logits.topk(told(served, "selector_top_k")).values[..., -1:]
    return served.widened(every.masked_fill(logits < least, -torch.inf))


def told(served: Served, key: str) -> Any:
    """What config.json says of one of a head's own sizes."""
    nested = served.fields.get("dflash_config") or {}
    return nested[key] if key in nested else served.fields.get(key)


def convolved(served: Served, normed: Tensor, name: str, slots: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """An `Around` of convolutions."""
    base = served.weights[f"{name}_conv.base_kernel"]
    taps, group = base.shape[1], told(served, "conv_group_size")
    moving = served.linear(normed, f"{name}_conv.kernel_projection").unflatten(-1, (2, taps, -1))
    slot = torch.arange(len(normed)) % slots

    def over(x: Tensor, side: int) -> Tensor:
        made = torch.zeros_like(x)
        for tap in range(taps):
            kernel = base[side, tap] + moving[:, side, tap].repeat_interleave(group, -1)
            made += kernel * x.roll(tap, 0) * (slot >= tap)[:, None]
        return made

    return over(normed, 0), lambda made: over(made, 1)
