"""Where the nodes of a round lie in a head's cache, and what they see."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.drafters.layers import Extend
from decode.forward.cache import SlotCache


class Slots:
    """Places passes in the first `visible` slots of a cache."""

    def __init__(self, cache: SlotCache, visible: int, device: torch.device) -> None:
        self.cache, self.slots = cache, torch.arange(visible, device=device)

    def straight(self, first: Tensor, width: int, num_layers: int) -> tuple[Tensor, list[Extend]]:
        """Positions (B, W) of W slots from first (B, 1) on, each of which sees all before it, and the caches.

        What would lie before the first slot of a row is put there (`head_round`).
        """
        own = (first + self.slots[:width]).clamp(min=0)
        return own, self._extends(own, self.slots <= own[..., None], num_layers)

    def block(self, first: Tensor, width: int, num_layers: int) -> tuple[Tensor, list[Extend]]:
        """The same where the W slots see each other, later ones too."""
        own = first + self.slots[:width]
        visible = (self.slots < first + width)[:, None].expand(-1, width, -1)
        return own, self._extends(own, visible, num_layers)

    def nodes(self, first: Tensor, visible: Tensor, num_layers: int) -> list[Extend]:
        """The caches for the last W of M nodes from slot first (B, 1) on, which see the slots before it and, among the
        nodes, those that visible (1 or B, W, M) marks."""
        batch, (width, num_nodes) = len(first), visible.shape[1:]
        nodes = first + self.slots[:num_nodes]
        before = (self.slots < first)[:, None].expand(batch, width, -1)
        index = nodes[:, None].expand(batch, width, num_nodes)
        seen = before.scatter(2, index, visible.expand(batch, -1, -1))
        return self._extends(nodes[:, num_nodes - width :], seen, num_layers)

    def _extends(self, own: Tensor, visible: Tensor, num_layers: int) -> list[Extend]:
        self.cache.place(own, len(self.slots))
        return [into(self.cache, layer, visible) for layer in range(num_layers)]


def into(cache: SlotCache, layer: int, visible: Tensor) -> Extend:
    """Keys and values of a pass go where `cache.place` said, into one layer, and its queries see `visible`."""
    return lambda keys, values: (*cache.slot_layers[layer].update(keys, values), visible)
