"""A draft as it lies in a folder, computed by plain functions that share nothing with our own modules: a mistake in
those, or on the way from them into the folder, shows as other logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@dataclass(frozen=True)
class Served:
    """What a replica computes with: everything in float32."""

    fields: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    """By the names of vLLM."""
    embedding: Tensor
    """(V, d) the target's, in the folder's precision; used where the folder ships none."""
    head: Tensor
    """(V, d) rows of the target's output head, likewise."""
    drafted: Tensor | None
    """(V_draft,) the target's ids of a reduced draft vocabulary."""
    mask: Tensor
    """(1, d) what stands in a block for tokens that are not there yet; of no use to the others."""

    def embed(self, ids: Tensor) -> Tensor:
        """ids (...) -> (..., d)."""
        return self.weights.get("embed_tokens.weight", self.embedding)[ids]

    def logits(self, state: Tensor) -> Tensor:
        """state (..., d) -> (..., V_draft)."""
        return linear(state, self.weights.get("lm_head.weight", self.head))

    def widened(self, drafted: Tensor) -> Tensor:
        """drafted (..., V_draft) -> (..., V), -inf for the tokens that are not drafted."""
        if self.drafted is None:
            return drafted
        every = drafted.new_full((*drafted.shape[:-1], len(self.embedding)), -torch.inf)
        every[..., self.drafted] = drafted
        return every

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Root mean square norm by the weights of that name."""
        eps = self.fields["rms_norm_eps"]
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.weights[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Through the matrix of that name, with its bias where there is one."""
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        """Llama's."""
        gate, up = (self.linear(x, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        return self.linear(silu(gate) * up, f"{layer}.mlp.down_proj")

    def split(self, x: Tensor, name: str, count: str) -> Tensor:
        """(T, in) -> (heads, T, head_dim) by the projection of that name."""
        return self.linear(x, name).unflatten(-1, (self.fields[count], -1)).transpose(0, 1)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (heads, T, head_dim) turned to positions (T,): halves against each other."""
        frequencies, scale = self._frequencies(int(positions.max()) + 1)
        angles = positions[:, None] * frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def heads(self, x: Tensor, layer: str, kind: str, positions: Tensor) -> Tensor:
        """(heads, T, head_dim) queries (q) or keys (k) at positions (T,), normed as Qwen3's are where the folder holds
        such norms."""
        name = f"{layer}.self_attn.{kind}"
        split = self.split(x, f"{name}_proj", "num_attention_heads" if kind == "q" else "num_key_value_heads")
        is_normed = f"{name}_norm.weight" in self.weights
        return self.turned(self.norm(split, f"{name}_norm") if is_normed else split, positions)

    def _frequencies(self, length: int) -> tuple[Tensor, float]:
        size = self.fields["head_dim"]
        rope = self.fields.get("rope_parameters") or {
            **(self.fields.get("rope_scaling") or {}),
            "rope_theta": self.fields.get("rope_theta") or 1e4,  # null says nothing
        }
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return rope["rope_theta"] ** -(torch.arange(0, size, 2) / size), 1.0
        longest = self.fields.get("max_position_embeddings", 2048)
        config = LlamaConfig(head_dim=size, rope_parameters=dict(rope), max_position_embeddings=longest)
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """queries (H, T, c), keys and values (H_kv, S, c), visible (T, S) -> (T, H * c)."""
    groups = queries.shape[0] // keys.shape[0]
    keys, values = (one.repeat_interleave(groups, 0) for one in (keys, values))
    scores = queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5
    mixed = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values
    return mixed.transpose(0, 1).flatten(1)


def attended(served: Served, read: Tensor, layer: str, known: list[tuple[Tensor, Tensor]]) -> Tensor:
    """read (T, in) -> (T, d) a layer's attention in the step after those whose keys and values are `known`: slots see
    the true slots up to their own, and their own ones of the steps before."""
    count, step = len(read), len(known)
    positions = torch.arange(count) + step
    values = served.split(read, f"{layer}.self_attn.v_proj", "num_key_value_heads")
    known.append((served.heads(read, layer, "k", positions), values))
    visible = torch.cat([torch.ones(count, count).tril(), *[torch.eye(count)] * step], 1).bool()
    all_keys, all_values = (torch.cat(one, 1) for one in zip(*known, strict=True))
    mixed = attend(served.heads(read, layer, "q", positions), all_keys, all_values, visible)
    return served.linear(mixed, f"{layer}.self_attn.o_proj")


def tokens_before(ids: Tensor, places: Tensor, steps: int) -> Tensor:
    """(S, N) the token before the one that each step drafts."""
    padded = torch.cat([ids, ids.new_zeros(steps)])
    return torch.stack([padded[places + step] for step in range(steps)])


Around = Callable[[Served, Tensor, str, int], tuple[Tensor, Callable[[Tensor], Tensor]]]
"""(served, normed (N * slots, d), layer and sublayer, slots of a block) -> what a sublayer is given, and what is made
of what it gives."""


def untouched(_served: Served, normed: Tensor, _name: str, _slots: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """As most layers have it."""
    return normed, lambda made: made


Replica = Callable[[Served, Tensor, Tensor, Tensor, int], Tensor]
"""(served, ids (T,), features (T, n, d), places (N,), steps S) -> (S, N, V): at each place the token there is the last
that is committed, and hidden states are known of those before it; step s has the logits of the s-th token behind it
(from 0), the tokens between as they stand in ids."""
