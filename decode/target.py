"""Forward passes of a causal LM over a slot cache: the target, and a draft LM as well.

Rows are left-aligned and ragged: row b has its own number of tokens in the cache. One pass runs a tree per row; its
nodes see the row's cached tokens and their own ancestors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.cache import SlotCache
from decode.house.errors import InputError
from decode.masks import layer_masks
from decode.models import device_of, longest_context, refuse_unsupported
from decode.tree import ancestors, chain_parents, tree_depths

PREFILL_CHUNK = 512  # tokens a pass: bounds the (T, S) mask and the activations of a long prompt


class CachedModel:
    """An unmodified transformers model with a SlotCache of `capacity` tokens a row."""

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self.model = model
        refuse_unsupported(model.config, model.config.name_or_path or "")
        self.config = model.config.get_text_config()
        if self.config._attn_implementation not in ("sdpa", "eager"):
            raise InputError(
                f"attention {self.config._attn_implementation!r} takes no explicit masks, so rejected tokens and "
                "other rows "
                "would be seen; load the model with attn_implementation='sdpa'"
            )
        self.device = device_of(model)
        self.cache = SlotCache(self.config.num_hidden_layers, capacity)
        self._slots = torch.arange(capacity, device=self.device)
        self._last_position = (longest_context(model.config) or capacity) - 1

    def prefill(self, ids: Tensor, lengths: list[int]) -> None:
        """Read ids[b, :lengths[b]] (B, T), left-aligned; what lies behind a shorter row's end is written and never
        seen."""
        longest = max(lengths)
        for start in range(0, longest, PREFILL_CHUNK):
            tokens = ids[:, start : min(start + PREFILL_CHUNK, longest)]
            self.forward(tokens, [start] * ids.shape[0], chain_parents(tokens.shape[1]), num_logits=1)

    def forward(
        self, tokens: Tensor, starts: list[int], parents: tuple[int, ...], num_logits: int | None = None
    ) -> Tensor:
        """Logits (B, N, V) of the nodes tokens[b, n], which follow the row's first starts[b] cached tokens.

        `num_logits` keeps those of the last few nodes. Node n is written to slot starts[b] + n.
        """
        self._place(starts, tokens.shape[1])
        positions = self._positions(starts, parents)
        masks = layer_masks(
            self.config,
            self._visibility(starts, parents),
            positions,
            self._key_positions(starts, parents),
            self.model.dtype,
        )
        return self.model(
            input_ids=tokens,
            attention_mask=masks,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=num_logits or 0,
        ).logits

    def _place(self, starts: list[int], num_nodes: int) -> None:
        same = len(set(starts)) == 1
        own = torch.tensor(starts, device=self.device)[:, None] + self._slots[:num_nodes]
        slots = slice(starts[0], starts[0] + num_nodes) if same else own
        self.cache.place(slots, max(starts) + num_nodes)

    def _positions(self, starts: list[int], parents: tuple[int, ...]) -> Tensor:  # (B, N)
        """Nodes past the context's end belong to rows that are cut before them; clamped, so that no table overflows."""
        depths = tree_depths(parents)
        rows = [[min(start + depth, self._last_position) for depth in depths] for start in starts]
        return torch.tensor(rows, device=self.device)

    def _visibility(self, starts: list[int], parents: tuple[int, ...]) -> Tensor:  # (B, N, S) bool
        num_nodes = len(parents)
        first = torch.tensor(starts, device=self.device)[:, None, None]
        offset = (
            self._slots[: self.cache.visible_slots] - first
        )  # (B, 1, S): node index of a slot, negative if committed
        if parents == chain_parents(num_nodes):
            return offset <= self._slots[:num_nodes, None]
        own = ancestors(parents).to(self.device)
        inside = own[:, offset[:, 0].clamp(0, num_nodes - 1)].transpose(0, 1)  # (B, N, S)
        return (offset < 0) | (inside & (offset < num_nodes))

    def _key_positions(self, starts: list[int], parents: tuple[int, ...]) -> Tensor:  # (B, S)
        """Position of what each slot holds; a committed token's is its slot."""
        slots = self._slots[: self.cache.visible_slots].expand(len(starts), -1)
        if parents == chain_parents(len(parents)):
            return slots
        depth = torch.tensor(tree_depths(parents), device=self.device)
        first = torch.tensor(starts, device=self.device)[:, None]
        offset = slots - first
        return torch.where(offset < 0, slots, first + depth[offset.clamp(0, len(parents) - 1)])

    def commit(self, starts: list[int], path: Tensor, is_chain: bool) -> None:
        """Bring the accepted path (B, D + 1) of the last pass to the slots of its positions; a chain lies there
        already."""
        if not is_chain:
            self.cache.move(starts, path)
