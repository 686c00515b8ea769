"""A preallocated key/value cache for unmodified transformers models: ragged batches, trees, rollback that costs
nothing.

Slot s of a row holds the token at position s for committed tokens; tree nodes lie in the slots after them until the
verdict. A rejected token is forgotten by not being visible, and overwritten by the next pass. Sliding-window layers
keep all slots and are masked by position: more memory than a ring buffer, but a ring cannot be rolled back.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotCache(Cache):
    """Keys and values of B rows of `capacity` slots for each layer, written where `place` says."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.slots: slice | Tensor = slice(0, 0)
        self.visible_slots = 0
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])

    def place(self, slots: slice | Tensor, visible_slots: int) -> None:
        """The next forward writes its tokens at `slots`, the same ones in every row (slice) or each row's own (B, T);
        attention is given a view of the first `visible_slots` slots, and needs a mask of that many columns."""
        assert visible_slots <= self.capacity, (visible_slots, self.capacity)
        self.slots, self.visible_slots = slots, visible_slots

    @property
    def slot_layers(self) -> list[SlotLayer]:
        """The layers, by the type they have here."""
        return cast(list[SlotLayer], self.layers)

    def move(self, starts: list[int], path: Tensor) -> None:
        """Compact: slot starts[b] + i takes what slot starts[b] + path[b, i] holds (path (B, D + 1), path[:, 0] =
        0)."""
        first, rows = torch.tensor(starts)[:, None], torch.arange(len(starts))[:, None]
        source, goal = first + path.cpu(), first + torch.arange(path.shape[1])
        for layer in self.slot_layers:
            for stored in (layer.keys, layer.values):
                assert stored is not None
                at = [index.to(stored.device) for index in (rows, goal, source)]
                stored[at[0], :, at[1]] = stored[at[0], :, at[2]]


class SlotLayer(CacheLayerMixin):
    """One layer of a SlotCache: two buffers (B, heads, capacity, d_head), made at the first update."""

    is_sliding = False
    is_croppable = False
    is_compileable = True

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate; zeros rather than empty memory, because a masked NaN still poisons a sum (0 * NaN)."""
        self.keys = _buffer(key_states, self.cache.capacity)
        self.values = _buffer(value_states, self.cache.capacity)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, T, d_head) where the cache says and return views of the visible slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        slots, end = self.cache.slots, self.cache.visible_slots
        if isinstance(slots, slice):
            self.keys[:, :, slots] = key_states
            self.values[:, :, slots] = value_states
        else:
            rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
            slots = slots.to(key_states.device)  # a spread model keeps its layers on several
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(visible slots, offset): consulted only where a model builds its own mask, which explicit masks prevent."""
        return self.cache.visible_slots, 0

    def get_seq_length(self) -> int:
        """Slots in sight; consulted only where a model makes its own positions, which explicit ones prevent."""
        return self.cache.visible_slots

    def get_max_length(self) -> int:
        """Capacity in tokens."""
        return self.cache.capacity

    def get_max_cache_shape(self) -> int:
        """Capacity in tokens, under the name that transformers before 5.20 asks for."""
        return self.cache.capacity


def _buffer(states: Tensor, capacity: int) -> Tensor:
    batch, heads, _, width = states.shape
    return torch.zeros(batch, heads, capacity, width, dtype=states.dtype, device=states.device)
