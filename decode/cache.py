"""A preallocated key/value cache for unmodified transformers models: ragged batches, trees, rollback that costs nothing.

Slot s of a row holds the token at position s for committed tokens; tree nodes lie in the slots after them until the verdict.
A rejected token is forgotten by not being visible, and overwritten by the next pass. Sliding-window layers keep all slots
and are masked by position: more memory than a ring buffer, but a ring cannot be rolled back.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotCache(Cache):
    """Keys and values of B rows of `capacity` slots for each layer, written where `place` says."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.starts: list[int] = [0]
        self.visible_slots = 0
        self._slots: Tensor | None = None
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])

    def place(self, starts: list[int], length: int, device: torch.device) -> None:
        """The next forward writes `length` tokens of row b at slots starts[b], starts[b] + 1, ...; attention sees a view
        of all slots up to the last one written, so that the mask has starts.max() + length columns."""
        assert max(starts) + length <= self.capacity, (starts, length, self.capacity)
        self.starts, self.visible_slots = starts, max(starts) + length
        self._slots = None
        if len(set(starts)) > 1:
            self._slots = torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)

    def move(self, starts: list[int], path: Tensor) -> None:
        """Compact: slot starts[b] + i takes what slot starts[b] + path[b, i] holds (path (B, D + 1), path[:, 0] = 0)."""
        source = torch.tensor(starts, device=path.device)[:, None] + path
        goal = torch.tensor(starts, device=path.device)[:, None] + torch.arange(path.shape[1], device=path.device)
        rows = torch.arange(len(starts), device=path.device)[:, None]
        for layer in self.layers:
            for stored in (layer.keys, layer.values):
                assert stored is not None
                stored[rows, :, goal] = stored[rows, :, source]


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

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write (B, heads, T, d_head) where the cache says and return views of the visible slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.cache.visible_slots
        if self.cache._slots is None:
            start = self.cache.starts[0]
            self.keys[:, :, start:end] = key_states
            self.values[:, :, start:end] = value_states
        else:
            rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
            self.keys[rows, :, self.cache._slots] = key_states.transpose(1, 2)
            self.values[rows, :, self.cache._slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(visible slots, offset): consulted only where a model builds its own mask, which explicit masks prevent."""
        return self.cache.visible_slots, 0

    def get_seq_length(self) -> int:
        """Slots before the ones being written; positions are always given explicitly."""
        return self.cache.starts[0]

    def get_max_length(self) -> int:
        """Capacity in tokens."""
        return self.cache.capacity

    def get_max_cache_shape(self) -> int:
        """Capacity in tokens, under the name that transformers before 5.20 asks for."""
        return self.cache.capacity


def _buffer(states: Tensor, capacity: int) -> Tensor:
    batch, heads, _, width = states.shape
    return torch.zeros(batch, heads, capacity, width, dtype=states.dtype, device=states.device)
