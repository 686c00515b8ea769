"""Keys and values of the steps that a recursive head is unrolled to in training (training-time test)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from decode.drafters.layers import Mix, under
from decode.forward.attention import packed_visibility
from decode.forward.merged_attention import Reach, merged
from decode.forward.window import Window


class Unrolled:
    """A query of step s sees the true keys (step 0) of its document up to its own slot, and of later steps its own slot
    alone; all of them within the window, for which step s stands s places on."""

    def __init__(self, document: Tensor, positions: Tensor, window: Window | None) -> None:  # (B, T) both
        self.document, self.positions, self.window = document, positions, window

    def mix(self, *known: Tensor) -> Mix:
        """How a step mixes: known are keys and values (B, H_kv, T, d_head) of each step before, and of its own."""
        keys, values = known[0::2], known[1::2]
        step = len(keys) - 1
        if keys[0].device.type == "cpu":
            reach = Reach.of(self.document, self.positions, self.window, step)
            return partial(merged, keys=keys, values=values, reach=reach)
        return under(torch.cat(keys, 2), torch.cat(values, 2), self.visible(step))

    def visible(self, step: int) -> Tensor:  # (B, T, (step + 1) T) bool
        """What slots of a step see, of all keys so far."""
        causal = packed_visibility(self.document)
        own = torch.eye(causal.shape[1], dtype=torch.bool, device=causal.device).expand_as(causal)
        visible = torch.cat([causal, *[own] * step], 2)
        if self.window is not None:
            places = torch.cat([self.positions + one for one in range(step + 1)], 1)
            visible &= self.window.sees(self.positions + step, places)
        return visible
