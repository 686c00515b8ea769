"""Forward passes of a causal LM over a slot cache: the target, and a draft LM as well.

Rows are left-aligned and ragged: row b has its own number of tokens in the cache. One pass runs nodes of a tree per
row; they see the row's committed tokens and their own ancestors. Short passes are captured after a few uses.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.common.environment import device_of
from decode.common.errors import InputError
from decode.forward.attention import attending, layer_masks, long_way, short_way
from decode.forward.cache import SlotCache
from decode.forward.kept.lease import Lease
from decode.forward.kept.runners import Runners
from decode.forward.packed_linear import Packed
from decode.forward.packing import Packing
from decode.forward.runner import Runner, chunks, rounded
from decode.models.compatibility import cache_argument, longest_context, refuse_unsupported
from decode.models.hidden_states import Taps
from decode.models.structure import decoder_of


class NodePass(nn.Module):
    """Logits (B, W, V) of the last W of M nodes per row; the attention looks at the first `visible` slots under a
    mask that is made here from the inputs, so that one capture serves every position."""

    def __init__(
        self, model: PreTrainedModel, cache: SlotCache, held: Tensor, visible: int, taps: Taps | None = None
    ) -> None:
        """`held` (B, capacity): the position of the node in each slot, kept from one pass of a round to the next."""
        super().__init__()
        self.model, self.cache, self.taps = model, cache, taps
        self.config = model.config.get_text_config()
        self.slots = torch.arange(visible, device=device_of(model))
        self.held = held
        self.attention = short_way(model, len(held))
        self.last_position = (longest_context(model.config) or cache.capacity) - 1
        self.written: tuple[Tensor, ...] = ()
        """What a capture of this pass alone writes, besides keys and values, and does not read again."""

    def forward(self, tokens: Tensor, starts: Tensor, depths: Tensor, above: Tensor) -> tuple[Tensor]:
        """tokens (B, W), starts (B, 1): committed tokens per row, depths (B, W), above (B, W, M) bool: ancestors.

        Node j lies in slot starts + j. Positions past the context's end belong to rows that are cut before them; they
        are clamped, so that no table overflows.
        """
        batch, width, num_nodes = above.shape
        nodes, positions = starts + self.slots[:num_nodes], starts + depths
        own = nodes[:, num_nodes - width :]
        committed = (self.slots < starts)[:, None].expand(batch, width, -1)
        visible = committed.scatter(2, nodes[:, None].expand(batch, width, num_nodes), above)
        self.held.scatter_(1, own, positions)
        keys = torch.where(self.slots < starts, self.slots, self.held[:, : len(self.slots)])
        return self._over(tokens, own, positions, visible, keys)

    def chain(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor]:
        """The same for tokens that follow one another, whose slots are their positions: a third of the small steps."""
        own = starts + self.slots[: tokens.shape[1]]
        return self._over(tokens, own, own, self.slots <= own[..., None], self.slots.expand(len(tokens), -1))

    def _over(self, tokens: Tensor, own: Tensor, positions: Tensor, visible: Tensor, keys: Tensor) -> tuple[Tensor]:
        return (self._called(self.model, tokens, own, positions, visible, keys).logits,)

    def _called(
        self, part: nn.Module, tokens: Tensor, own: Tensor, positions: Tensor, visible: Tensor, keys: Tensor
    ) -> Any:
        """What the model says, or `part` of it."""
        self.cache.place(own, len(self.slots))
        with attending(self.model, self.attention), self.taps or nullcontext():
            out = part(
                input_ids=tokens,
                attention_mask=layer_masks(self.config, visible, positions, keys, self.model.dtype),
                position_ids=positions.clamp(max=self.last_position),
                use_cache=True,
                **_handed(self.cache, self.model),
            )
        if self.taps is not None:
            self.cache.keep(self.taps.each(), self.held.device)
        return out


class Part(Protocol):
    """Layers of a model that a pass runs: what makes such a pass of the whole one. Captures are found by it, so parts
    that run the same are equal."""

    def __call__(self, whole: NodePass) -> NodePass: ...

    def __hash__(self) -> int: ...


class StraightPass(nn.Module):
    """`NodePass.chain` as a module of its own, to be captured."""

    def __init__(self, node_pass: NodePass) -> None:
        super().__init__()
        self.node_pass, self.written = node_pass, node_pass.written

    def forward(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor]:
        """tokens (B, W), starts (B, 1) -> logits (B, W, V)."""
        return self.node_pass.chain(tokens, starts)


class CachedModel(Runner):
    """An unmodified transformers model with a SlotCache of B rows of at least `capacity` tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        batch_size: int,
        capacity: int,
        packing: Packed | None = None,
        taps: tuple[int, ...] = (),
    ) -> None:
        """`taps`: hidden states that passes keep beside keys and values (`features`)."""
        refuse_unsupported(model.config, model.config.name_or_path or "")
        self.model, self.config = model, model.config.get_text_config()
        _refuse_foreign_attention(self.config._attn_implementation)
        cache = SlotCache(self.config.num_hidden_layers, batch_size, rounded(capacity))
        super().__init__(cache, device_of(model), packing if packing is not None else Packing(model))
        self._taps = Taps(model, taps) if taps else None
        with self.passes(), torch.inference_mode(mode=False), torch.no_grad():
            self._slots = torch.arange(self.cache.capacity, device=self.device)
            self._held = torch.zeros(batch_size, self.cache.capacity, dtype=torch.long, device=self.device)
            first = torch.zeros(batch_size, 1, dtype=torch.long, device=self.device)
            self.node_pass(1)(first, first, first, first[..., None] == 0)  # tells the layers' shapes
            self.cache.allocate()

    @property
    def num_bytes(self) -> int:
        """Of its cache, the positions beside it, and its captures."""
        return super().num_bytes + self._held.nbytes + self._slots.nbytes

    @property
    def features(self) -> Tensor | None:
        """(B, capacity, n, d): the taps' hidden states of the tokens in the cache; None without taps."""
        return None if self.cache.states is None else self.cache.states[:, :, 0].permute(1, 2, 0, 3)

    def prefill(self, ids: Tensor, begin: list[int], end: list[int]) -> None:
        """Read ids[b, begin[b]:end[b]] of each row; ids (B, T) left-aligned. What lies behind the end of a row that is
        read beside a longer one is written too, and never seen."""
        for rows, start, stop in chunks(begin, end, self.device.type):
            with self.passes():
                self._read(ids, rows, start, stop)

    def _read(self, ids: Tensor, rows: list[int], start: int, end: int) -> None:
        index = None if len(rows) == ids.shape[0] else torch.tensor(rows, device=self.device)
        tokens = (ids if index is None else ids[index])[:, start:end]
        positions = self._slots[start:end].expand_as(tokens)
        keys = self._slots[:end].expand(len(rows), -1)
        visible = keys[:, None] <= positions[..., None]
        self.cache.hold(end)
        self.cache.place(slice(start, end), end, index)
        # without the output head: nobody asks for logits, and a row's of the last token alone took 0.13 s in bfloat16
        body = decoder_of(self.model)
        with attending(self.model, long_way(self.model)), self._taps or nullcontext():
            body(
                input_ids=tokens,
                attention_mask=layer_masks(self.config, visible, positions, keys, self.model.dtype),
                position_ids=positions,
                use_cache=True,
                **_handed(self.cache, body),
            )
        if self._taps is not None:
            self.cache.keep(self._taps.each(), self.device)

    def forward(
        self,
        tokens: Tensor,
        starts: Tensor,
        depths: Tensor,
        above: Tensor,
        last_start: int,
        part: Part | None = None,
    ) -> Tensor:
        """Logits (B, W, V) of nodes tokens (B, W), the last W of M that follow the row's starts (B, 1) committed ones,
        of which no row has more than `last_start`; by all layers, or by a part of them.

        depths (1 or B, W) counts from the first node, above (1 or B, W, M) marks each node and its ancestors. Node j of
        the M is in slot starts[b] + j, written by this pass or an earlier one of the round.
        """
        batch, (width, num_nodes) = tokens.shape[0], above.shape[1:]
        visible = self.visible(last_start + num_nodes)
        inputs = (tokens, starts, depths.expand(batch, -1), above.expand(batch, -1, -1))

        def moved() -> tuple[Tensor, ...]:
            return self.other(tokens), (starts + 1).clamp(max=visible - num_nodes), *inputs[2:]

        key = (width, num_nodes, visible, part)
        return self.run(key, lambda: self.node_pass(visible, part), inputs, moved)[0]

    def chain(  # (B, W) -> (B, W, V)
        self, tokens: Tensor, starts: Tensor, last_start: int, strict: bool = False, part: Part | None = None
    ) -> Tensor:
        """Logits of W tokens that follow one another after the row's starts (B, 1) committed ones, of which no row has
        more than `last_start`; by all layers, or by a part of them.

        A strict pass looks at all slots and is captured at its first use: passes of as many tokens then run the same
        kernels wherever they are.
        """
        width = tokens.shape[1]
        visible = self.visible_to(last_start + width, strict)
        assert last_start + width <= visible, (last_start, width, visible)  # the last tokens must see themselves

        def moved() -> tuple[Tensor, ...]:
            return self.other(tokens), (starts + 1).clamp(max=visible - width)

        def make() -> StraightPass:
            return StraightPass(self.node_pass(visible, part))

        return self.run(("straight", width, visible, part), make, (tokens, starts), moved, strict)[0]

    def visible_to(self, end: int, strict: bool) -> int:
        """Slots that a pass looks at whose last node lies before slot `end`, all of them where it is strict; they are
        laid out, which a captured pass relies on."""
        if not strict:
            return self.visible(end)
        self.cache.lay_out(self.cache.capacity)
        return self.cache.capacity

    def other(self, tokens: Tensor) -> Tensor:
        """Other tokens everywhere, by which a capture is compared with its pass: experts are chosen by the token."""
        return (tokens + 1) % self.config.vocab_size

    def node_pass(self, visible: int, part: Part | None = None) -> NodePass:
        """The pass over the first `visible` slots, not captured; by all layers, or by a part of them."""
        whole = NodePass(self.model, self.cache, self._held, visible, self._taps)
        return whole if part is None else part(whole)

    def commit(self, starts: Tensor, path: Tensor, is_chain: bool) -> None:
        """Bring the accepted path (B, D + 1) of the last pass, which began at starts (B, 1), to the slots of its
        positions; a chain lies there already."""
        if not is_chain:
            self.cache.move(starts, path)


def runner_for(
    model: PreTrainedModel,
    batch_size: int,
    capacity: int,
    lease: Lease,
    role: str = "target",
    taps: tuple[int, ...] = (),
) -> CachedModel:
    """The cached model for this many rows of this many tokens, kept with its captures from one call to the next.

    `role` keeps the caches of a model apart that drafts for itself; `lease` is the call that alone may use it.
    """
    runners = Runners.of(model, lambda: Packing(model))
    key = (role, batch_size, rounded(capacity), taps)
    return runners.get(key, lambda packing: CachedModel(model, batch_size, capacity, packing, taps), lease)


def _refuse_foreign_attention(name: str | None) -> None:
    if name not in ("sdpa", "eager"):
        raise InputError(
            f"attention {name!r} takes no explicit masks, so rejected tokens and other rows would be seen; load the "
            "model with attn_implementation='sdpa'"
        )


def _handed(cache: SlotCache, model: nn.Module) -> dict[str, Any]:
    name = cache_argument(type(model))
    assert name is not None, type(model)  # refuse_unsupported
    return {name: cache}
