"""Scores for the candidates of a block, by who goes with whom (LiLiCorr, arXiv 2608.20530).

Slots of a block are drafted apart, so that each of its tokens may be likely and two of them in a row make no sense.
Each slot has its k likeliest tokens; a small transformer sees all of them at once, and gives each a vector `out` for
what may come behind it and a vector `in` for what may stand before it, of length 1:

    score_t(c) = scale * <out of the candidate before, in of c>        of slot 0: <out of the text so far, in of c>

Names and shapes of the weights are those that vLLM loads (vLLM 0.32, model_executor/models/lilicorr.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention, silu

NUM_FEATURES = 5
SMALL = 0.02
"""Standard deviation of new weights. Of the vectors' own, zeros would be for good: a product of two has no gradient."""


@dataclass(frozen=True)
class Scores:
    """Of B blocks of N slots with k candidates each."""

    candidates: Tensor
    """(B, N, k) tokens of the target."""
    rows: Tensor
    """(B, N, k) where they stand among the tokens that the draft knows."""
    first: Tensor
    """(B, k) of slot 0."""
    pairs: Tensor
    """(B, N - 1, k, k) of a candidate of slot s, and one of the slot behind it."""

    def behind(self, tokens: Tensor, slot: int) -> Tensor:
        """(B, W, 2 k) scores of the slot's candidates behind each of tokens (B, W), and their rows; scores of 0 behind
        what was no candidate of the slot before, of which the lattice says nothing.

        The rows come along, since the best of logits that were made in another shape may be others: of 20 bfloat16
        knows eighths.
        """
        rows = self.rows[:, slot, None].to(self.first).expand(-1, tokens.shape[1], -1)
        if slot == 0:
            return torch.cat([self.first[:, None].expand_as(rows), rows], -1)
        chosen = tokens[..., None] == self.candidates[:, slot - 1, None]
        place = chosen.to(torch.int8).argmax(-1, keepdim=True).expand_as(rows)
        return torch.cat([self.pairs[:, slot - 1].gather(1, place) * chosen.any(-1, keepdim=True), rows], -1)


class LatticeAttention(nn.Module):
    """Over all candidates of a block, as torch's MultiheadAttention names its weights."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x (B, L, d), bias (heads, L, L) added to the products -> (B, L, d)."""
        parts = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        queries, keys, values = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=bias[None].to(queries.dtype))
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class UpDown(nn.Module):
    """A plain MLP."""

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, inner), nn.Linear(inner, out)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> (..., out)."""
        return self.down_proj(silu(self.up_proj(x)))


class LatticeLayer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.attn, self.mlp = LatticeAttention(width, heads), UpDown(width, inner, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x (B, L, d), bias (heads, L, L) -> (B, L, d)."""
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class CandidateLattice(nn.Module):
    """Scores of the candidates of whole blocks."""

    def __init__(self, config: Any) -> None:
        """`config` is a `LiLiCorrConfig`."""
        super().__init__()
        outer, width = config.hidden_size, config.lattice_width
        sizes = (width, config.lattice_heads, int(width * config.lattice_mlp), config.rms_norm_eps)
        self.scale, self.eps = config.logit_scale, config.vector_eps
        self.token_proj = nn.Identity() if outer == width else nn.Linear(outer, width)
        self.pass_hidden_proj, self.context_proj = nn.Linear(outer, width), nn.Linear(outer, width)
        self.feature_norm = nn.LayerNorm(NUM_FEATURES)
        self.feature_mlp = UpDown(NUM_FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, config.depth, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, config.candidates, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(config.lattice_heads, 2 * config.depth + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(config.lattice_heads))
        self.layers = nn.ModuleList(LatticeLayer(*sizes) for _ in range(config.lattice_layers))
        self.output_norm, self.anchor_norm = (nn.RMSNorm(width, config.rms_norm_eps) for _ in range(2))
        self.factor_input_proj = nn.Linear(3 * width, width)
        heads = (nn.Linear(width, config.factor_dim) for _ in range(3))
        self.out_head, self.in_head, self.anchor_out_head = heads
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=SMALL)
                nn.init.zeros_(module.bias)

    def forward(
        self, embedded: Tensor, log_q: Tensor, states: Tensor, before: Tensor, has_before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The target's embedding of the candidates (B, N, k, d), their log q (B, N, k), likeliest first, the slots'
        final states (B, N, d), and what is read of the last token that the target has states of, (B, d), where
        `has_before` (B,) says that there is one -> `Scores.first` and `Scores.pairs`."""
        slots, count = log_q.shape[1:]
        x = self.token_proj(embedded) + self.pass_hidden_proj(states)[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(features_of(log_q).to(x.dtype)))
        x = (x + self.slot_embedding[0] + self.rank_embedding[0]).flatten(1, 2)
        bias = self._bias(slots, count)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).unflatten(1, (slots, count))
        text = self.context_proj(before)
        text = self.anchor_norm(text if has_before is None else text * has_before[:, None])
        shown = text[:, None, None].expand_as(x)
        factors = silu(self.factor_input_proj(torch.cat([x, shown, x * shown], -1)))
        comes, goes = self._vector(self.in_head(factors)), self._vector(self.out_head(factors))
        begins = self._vector(self.anchor_out_head(text))
        with torch.autocast(x.device.type, enabled=False):  # of 16 bfloat16 knows sixteenths
            pairs = goes[:, :-1] @ comes[:, 1:].transpose(-1, -2)
        return self.scale * (begins[:, None] * comes[:, 0]).sum(-1), self.scale * pairs

    def _vector(self, x: Tensor) -> Tensor:
        return normalize(x, dim=-1, eps=self.eps).to(torch.promote_types(x.dtype, torch.float32))

    def _bias(self, slots: int, count: int) -> Tensor:  # -> (heads, N * k, N * k)
        """By how far two candidates' slots are apart."""
        slot = torch.arange(slots, device=self.same_slot_bias.device).repeat_interleave(count)
        apart = slot[:, None] - slot
        middle = self.relative_slot_bias.shape[1] // 2
        return self.relative_slot_bias[:, apart + middle] + (apart == 0) * self.same_slot_bias[:, None, None]


def features_of(log_q: Tensor) -> Tensor:  # (B, N, k) -> (B, N, k, 5)
    """log q, q, log q beside the slot's best, place among the candidates from 0 to 1, and whether it is the first."""
    rank = torch.arange(log_q.shape[-1], device=log_q.device)
    place = (rank / max(1, len(rank) - 1)).to(log_q).expand_as(log_q)
    return torch.stack([log_q, log_q.exp(), log_q - log_q[..., :1], place, (rank == 0).to(log_q).expand_as(log_q)], -1)
