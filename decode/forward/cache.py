"""A preallocated key/value cache for unmodified transformers models: ragged batches, trees, rollback that costs
nothing.

Slot s of a row holds the token at position s for committed tokens; tree nodes lie in the slots after them until the
verdict. A rejected token is forgotten by not being visible, and overwritten by the next pass. Sliding-window layers
keep all slots and are masked by position: more memory than a ring buffer, but a ring cannot be rolled back. Only the
slots that passes look at are laid out (`slot_stack`), and laid out anew when rows have grown beyond them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decode.forward.slot_stack import Shape, SlotStack, bucket


@dataclass
class Places:
    """Where the next pass writes, and how far its attention sees. A cache and its layers share it instead of knowing
    one another: a cycle of them, the largest thing here, would not be freed before Python looks for cycles."""

    num_rows: int
    capacity: int
    slots: slice | Tensor = field(default_factory=lambda: slice(0, 0))
    visible_slots: int = 0
    rows: Tensor | None = None

    def write(self, stored: Tensor, values: Tensor) -> Tensor:
        """values (B, heads, T, d) into the slots of stored (B, heads, S, d); the visible slots of it."""
        slots, rows, end = self.slots, self.rows, self.visible_slots
        if rows is not None:
            assert isinstance(slots, slice)
            rows = rows.to(stored.device)  # a spread model keeps its layers on several
            stored[rows, :, slots] = values
            return stored[rows, :, :end]
        if isinstance(slots, slice):
            stored[:, :, slots] = values
        elif len(values) == 1:
            stored.index_copy_(2, slots[0].to(stored.device), values)  # 3 us, where writing by two indices takes 13
        else:
            every = torch.arange(values.shape[0], device=stored.device)[:, None]
            stored[every, :, slots.to(stored.device)] = values.transpose(1, 2)
        return stored[:, :, :end]


class SlotCache(Cache):
    """Keys and values of B rows of `capacity` slots for each layer, written where `place` says."""

    def __init__(self, num_layers: int, batch_size: int, capacity: int) -> None:
        self.capacity, self._places = capacity, Places(batch_size, capacity)
        self.states: Tensor | None = None
        """(n, B, 1, capacity, d) hidden states of the tokens in the slots, where a pass is asked to keep them: laid out
        as keys are, because they are written, overwritten and moved with them."""
        self._stacks: list[tuple[SlotStack, list[tuple[SlotLayer, str]]]] = []
        self.num_slots = 0
        """Slots that are laid out."""
        super().__init__(layers=[SlotLayer(self._places) for _ in range(num_layers)])

    def place(self, slots: slice | Tensor, visible_slots: int, rows: Tensor | None = None) -> None:
        """The next forward is over `rows` (all by default) and writes its tokens at `slots`, the same ones in every row
        (slice) or each row's own (B, T); attention is given the first `visible_slots` slots, which `hold` has laid out,
        and needs a mask of that many columns."""
        assert not self._stacks or visible_slots <= self.num_slots, (visible_slots, self.num_slots)
        places = self._places
        places.slots, places.visible_slots, places.rows = slots, visible_slots, rows

    @property
    def slot_layers(self) -> list[SlotLayer]:
        """The layers, by the type they have here."""
        return cast(list[SlotLayer], self.layers)

    def allocate(self) -> None:
        """Give the layers, which a first pass over one slot has told their shapes, room for all their slots: layers of
        equal shape and place in one stack, so that a commit is one gather. None is laid out yet."""
        alike = defaultdict(list)
        for layer in self.slot_layers:
            for name in ("keys", "values"):
                shown = getattr(layer, name)
                if shown is not None:
                    rows, heads, _, size = shown.shape
                    alike[Shape(rows, heads, size, shown.dtype, shown.device)].append((layer, name))
        for shape, parts in alike.items():
            self._stacks.append((SlotStack(len(parts), shape, self.capacity), parts))
        self.lay_out(0)

    def hold(self, end: int) -> None:
        """At least slots 0 ... end - 1 are laid out."""
        if end > self.num_slots:
            self.lay_out(min(bucket(end), self.capacity))

    def lay_out(self, slots: int) -> None:
        """Exactly the first `slots` are, so that passes over them read no others. What lay behind is forgotten; passes
        captured over another number write and read elsewhere until that number is laid out again."""
        if slots == self.num_slots and slots:
            return
        with torch.inference_mode(mode=False), torch.no_grad():  # captures take views that are ordinary tensors
            for stack, parts in self._stacks:
                stack.lay_out(slots)
                for view, (layer, name) in zip(stack.view, parts, strict=True):
                    setattr(layer, name, view)
        self.num_slots = slots

    def clear(self) -> None:
        """Empty, for another call: what one left that is no number would reach the next one through the mask."""
        self.lay_out(0)
        if self.states is not None:
            self.states.zero_()

    def take_over(self, other: SlotCache, num_slots: int) -> None:
        """The first slots of a cache of the same layers and rows."""
        self.hold(num_slots)
        pairs = [(mine.view, theirs.view) for (mine, _), (theirs, _) in zip(self._stacks, other._stacks, strict=True)]
        if self.states is not None and other.states is not None:  # one of them may have no room for them yet
            pairs.append((self.states, other.states))
        for mine, theirs in pairs:
            mine[..., :num_slots, :] = theirs[..., :num_slots, :]

    @property
    def stored(self) -> list[Tensor]:
        """(n, B, heads, slots, d) each: keys and values as they are laid out, and all slots of the hidden states."""
        held = [stack.view for stack, _ in self._stacks]
        return held if self.states is None else [*held, self.states]

    @property
    def num_rows(self) -> int:
        """B."""
        return self._places.num_rows

    @property
    def num_bytes(self) -> int:
        """Of keys, values and hidden states."""
        states = 0 if self.states is None else self.states.nbytes
        return states + sum(stack.num_bytes for stack, _ in self._stacks)

    def keep(self, states: list[Tensor], device: torch.device) -> None:
        """Hidden states of the pass that was just made, n of (B, T, d), into the slots of its tokens, on `device`:
        layers of one model may lie on several."""
        if self.states is None:
            shape = (len(states), self._places.num_rows, 1, self.capacity, states[0].shape[-1])
            self.states = torch.zeros(shape, dtype=states[0].dtype, device=device)
        for kept, state in zip(self.states, states, strict=True):
            self._places.write(kept, state[:, None].to(kept.device))

    def copied(self, slots: Tensor) -> tuple[Tensor, ...]:
        """What `stored` holds in slots (B, W), as (B, W, n, heads, d) each; slots past the end are the last one."""
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        places = [(held, slots.clamp(max=held.shape[-2] - 1).to(held.device)) for held in self.stored]
        return tuple(held[:, rows.to(held.device), :, at] for held, at in places)

    def move(self, starts: Tensor, path: Tensor) -> None:
        """Compact: slot starts[b] + i takes what slot starts[b] + path[b, i] holds.

        starts (B, 1), path (B, D + 1) with path[:, 0] = 0. Slots past the end belong to rows that are cut before them.
        """
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        source, goal = starts + path, starts + torch.arange(path.shape[1], device=path.device)
        for held in self.stored:
            row, at, to = (index.to(held.device) for index in (rows, source, goal))
            last = held.shape[-2] - 1
            held[:, row, :, to.clamp(max=last)] = held[:, row, :, at.clamp(max=last)]


class SlotLayer(CacheLayerMixin):
    """One layer of a SlotCache: keys and values (B, heads, slots, d_head), of a single slot until `allocate`."""

    is_sliding = False
    is_croppable = False
    is_compileable = True

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note shapes, types and places: the cache is by far the largest thing here, and is allocated once."""
        self.keys, self.values = self._slot(key_states), self._slot(value_states)
        self.is_initialized = True

    def _slot(self, states: Tensor) -> Tensor:
        shape = (self.places.num_rows, states.shape[1], 1, states.shape[3])
        return torch.zeros(shape, dtype=states.dtype, device=states.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, T, d_head) where the cache says and return the visible slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        return self.places.write(self.keys, key_states), self.places.write(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(visible slots, offset): consulted only where a model builds its own mask, which explicit masks prevent."""
        return self.places.visible_slots, 0

    def get_seq_length(self) -> int:
        """Slots in sight; consulted only where a model makes its own positions, which explicit ones prevent."""
        return self.places.visible_slots

    def get_max_length(self) -> int:
        """Capacity in tokens."""
        return self.places.capacity

    def get_max_cache_shape(self) -> int:
        """Capacity in tokens, under the name that transformers before 5.20 asks for."""
        return self.places.capacity
