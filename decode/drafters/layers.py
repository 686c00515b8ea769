"""The transformer parts that heads are built of, and where the nodes of a round lie in a head's cache; who sees whom is
the caller's business, so one forward serves both faces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import AfterValidator
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.forward.attention import fold
from decode.forward.cache import SlotCache
from decode.forward.window import Window

MOST_BASE = 1e12  # of rotary embeddings: models have 1e4 to 5e6
Mix = Callable[[Tensor], Tensor]
"""Queries (B, H, T, d_head) -> (B, T, H, d_head), the values mixed for each."""
Extend = Callable[[Tensor, Tensor], Mix]
"""New keys and values (B, H_kv, T, d_head) -> how T queries mix what they see of all there are by then. Training keeps
them in a list, decoding in a cache."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; weights are named as engines name them."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, rope: Rotary, *, input_width: int | None = None,
        qk_norm_eps: float | None = None, bias: bool = False,
    ) -> None:  # fmt: skip
        """`input_width` (default `width`) is what queries, keys and values are made from, with a `bias` (Qwen2);
        `qk_norm_eps` normalises queries and keys (Qwen3)."""
        super().__init__()
        made_from = input_width or width
        self.heads, self.kv_heads, self.head_dim, self.rope = heads, kv_heads, head_dim, rope
        self.q_proj = nn.Linear(made_from, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(made_from, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(made_from, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm = nn.Identity() if qk_norm_eps is None else nn.RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = nn.Identity() if qk_norm_eps is None else nn.RMSNorm(head_dim, qk_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, extend: Extend) -> Tensor:
        """x (B, T, input_width), positions (B, T) -> (B, T, width)."""
        mix = extend(*self.keys_values(x, positions))
        queries = self.rope(self.q_norm(self._split(self.q_proj(x), self.heads)), positions)
        return self.o_proj(mix(queries).flatten(2))

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, T, input_width) -> keys, turned to their positions, and values, both (B, H_kv, T, d_head)."""
        keys = self.rope(self.k_norm(self._split(self.k_proj(x), self.kv_heads)), positions)
        return keys, self._split(self.v_proj(x), self.kv_heads)

    def _split(self, x: Tensor, heads: int) -> Tensor:  # (B, T, heads * d_head) -> (B, heads, T, d_head)
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


def _sound(rope: dict[str, Any]) -> dict[str, Any]:
    """`rope` where it can be a rotary embedding, else ValueError: a base or factor of 0 would turn by NaN."""
    kind, base = rope.get("rope_type", "default"), rope.get("rope_theta")
    if kind not in ("default", *ROPE_INIT_FUNCTIONS):
        raise ValueError(f"its rope_type should be one of default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
    if isinstance(base, bool) or not isinstance(base, int | float) or not 1 < base <= MOST_BASE:
        raise ValueError(f"its rope_theta should be a number above 1 and at most {MOST_BASE:g}")
    for name, value in rope.items():
        numbers = value if isinstance(value, list) else [value]
        if name not in ("rope_type", "type") and not all(
            isinstance(one, int | float | None) and (one or 0) >= 0 for one in numbers
        ):
            raise ValueError(f"its {name} should hold no text, no object and nothing below 0")
        if name.endswith("factor") and not all(0 < (1 if one is None else one) < MOST_BASE for one in numbers):
            raise ValueError(f"its {name} should be above 0 and below {MOST_BASE:g}")
    return rope


Rope = Annotated[dict[str, Any], AfterValidator(_sound)]
"""transformers' rope_parameters."""


class Rotary(nn.Module):
    """Rotary positions of any kind that transformers knows (llama3, yarn ...); no weights."""

    def __init__(self, head_dim: int, rope: dict[str, Any], max_positions: int) -> None:
        """`rope` is transformers' `rope_parameters`."""
        super().__init__()
        config = LlamaConfig(
            hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=rope,
            max_position_embeddings=max_positions,
        )  # fmt: skip
        self.table = LlamaRotaryEmbedding(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """Moved with the draft, never cast: frequencies in bfloat16 are off by whole turns some thousand tokens on."""
        exact = dict(self.table.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self.table, name, buffer.to(getattr(self.table, name).device))
        return self

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, heads, T, d_head) turned to positions (B, T): halves are rotated against each other (neox)."""
        cos, sin = self.table(x, positions)
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


class Slots:
    """Places passes in the first `visible` slots of a cache, of which they see those in the `window`."""

    def __init__(self, cache: SlotCache, visible: int, device: torch.device, window: Window | None = None) -> None:
        self.cache, self.slots, self.window = cache, torch.arange(visible, device=device), window

    def straight(self, first: Tensor, width: int, num_layers: int) -> tuple[Tensor, list[Extend]]:
        """Positions (B, W) of W slots from first (B, 1) on, each of which sees all before it, and the caches.

        What would lie before the first slot of a row is put there (`head_round`).
        """
        own = (first + self.slots[:width]).clamp(min=0)
        visible = self.slots <= own[..., None]
        if self.window is not None:
            visible &= self.window.sees(own, self.slots[None])
        return own, self._extends(own, visible, num_layers)

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
        if self.window is not None:
            before, visible = self._near(first, before, visible)
        index = nodes[:, None].expand(batch, width, num_nodes)
        seen = before.scatter(2, index, visible.expand(batch, -1, -1))
        return self._extends(nodes[:, num_nodes - width :], seen, num_layers)

    def _near(self, first: Tensor, before: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Of slots (B, W, S) before first (B, 1) and nodes (B, W, M), those in the window of each of the W, by
        position: a node stands as many places behind `first` as it has ancestors, however many siblings lie between
        them."""
        assert self.window is not None
        places = first[..., None] - 1 + visible.long().cumsum(-1)  # of the ancestors; those of others are masked
        own = places[..., -1:]
        return before & self.window.keeps(own, self.slots), visible & self.window.keeps(own, places)

    def _extends(self, own: Tensor, visible: Tensor, num_layers: int) -> list[Extend]:
        self.cache.place(own, len(self.slots))
        return [into(self.cache, layer, visible) for layer in range(num_layers)]


def under(keys: Tensor, values: Tensor, visible: Tensor) -> Mix:
    """Of keys and values (B, H_kv, S, d_head) each query sees those that visible (B or 1, T, S) marks."""
    return lambda queries: fold(queries, keys, values, visible[:, None])


def into(cache: SlotCache, layer: int, visible: Tensor) -> Extend:
    """Keys and values of a pass go where `cache.place` said, into one layer, and its queries see `visible`."""
    return lambda keys, values: under(*cache.slot_layers[layer].update(keys, values), visible)
