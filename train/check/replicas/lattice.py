"""The lattice of LiLiCorr's candidates, one block at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, normalize, silu

from train.check.replicas.base import Served
from train.check.replicas.dflash2 import told


def scores(
    served: Served, embedded: Tensor, log_q: Tensor, states: Tensor, text: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of one block: (k,) of its first slot, (N - 1, k, k) of the others behind each candidate before."""
    slots, count = log_q.shape
    weights = served.weights

    def through(x: Tensor, name: str) -> Tensor:
        return served.linear(x, f"lilicorr.{name}")

    def mlp(x: Tensor, name: str) -> Tensor:
        return through(silu(through(x, f"{name}.up_proj")), f"{name}.down_proj")

    rank = torch.arange(count, dtype=log_q.dtype).expand(slots, -1)
    told_of = [log_q, log_q.exp(), log_q - log_q.amax(-1, keepdim=True), rank / max(1, count - 1), (rank == 0).float()]
    norm = (weights["lilicorr.feature_norm.weight"], weights["lilicorr.feature_norm.bias"])
    x = through(embedded, "token_proj") if "lilicorr.token_proj.weight" in weights else embedded
    x = (
        x
        + through(states, "pass_hidden_proj")[:, None]
        + mlp(layer_norm(torch.stack(told_of, -1), (5,), *norm), "feature_mlp")
    )
    x = (x + weights["lilicorr.slot_embedding"][0, 0] + weights["lilicorr.rank_embedding"][0, 0]).flatten(0, 1)
    for layer in (f"layers.{index}" for index in range(told(served, "lilicorr_num_layers"))):
        x = x + _attended(served, served.norm(x, f"lilicorr.{layer}.attn_norm"), f"lilicorr.{layer}.attn", count)
        x = x + mlp(served.norm(x, f"lilicorr.{layer}.mlp_norm"), f"{layer}.mlp")
    x = served.norm(x, "lilicorr.output_norm")
    begins = torch.zeros(x.shape[-1]) if text is None else through(text, "context_proj")
    begins = served.norm(begins, "lilicorr.anchor_norm")
    factors = silu(through(torch.cat([x, begins.expand_as(x), x * begins], -1), "factor_input_proj"))
    eps, scale = told(served, "lilicorr_vector_eps"), told(served, "lilicorr_logit_scale")
    comes, goes = (normalize(through(factors, f"{name}_head"), dim=-1, eps=eps) for name in ("in", "out"))
    begins = normalize(through(begins, "anchor_out_head"), dim=-1, eps=eps)
    comes, goes = comes.unflatten(0, (slots, count)), goes.unflatten(0, (slots, count))
    return scale * comes[0] @ begins, scale * goes[:-1] @ comes[1:].transpose(1, 2)


def _attended(served: Served, x: Tensor, name: str, count: int) -> Tensor:
    """Among all candidates (L, w), k of them in each slot."""
    heads, weights = told(served, "lilicorr_num_heads"), served.weights
    parts = linear(x, weights[f"{name}.in_proj_weight"], weights[f"{name}.in_proj_bias"])
    queries, keys, values = parts.unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
    slot = torch.arange(len(x)) // count
    apart = slot[:, None] - slot
    bias = weights["lilicorr.relative_slot_bias"][:, apart + served.fields["block_size"] - 1]
    bias = bias + weights["lilicorr.same_slot_bias"][:, None, None] * (apart == 0)
    scores = queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5 + bias
    return served.linear((scores.softmax(-1) @ values).transpose(0, 1).flatten(1), f"{name}.out_proj")
