"""Multi-token prediction: one layer over [embedding; final hidden state], shared by all steps (DeepSeek-V3, 2024;
applied to its own output as in FastMTP, 2025). Parts are named as in checkpoints that come with such layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decode.common.typed_config import require
from decode.drafters.head_draft import HeadConfig
from decode.drafters.layers import MLP, Attention, Extend
from decode.drafters.recursive import RecursiveDraft
from decode.models.ends import Ends
from decode.models.hidden_states import FINAL


@dataclass(frozen=True, kw_only=True)
class MTPConfig(HeadConfig):
    """Shape of an MTP layer; its only tap is the target's final hidden state."""

    family: str = "mtp"
    qk_norm: bool = False
    """Queries and keys are normalised, as in Qwen3."""
    attention_bias: bool = False
    """Queries, keys and values have biases, as in Qwen2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.taps == (FINAL,),
            f"mtp starts from the final hidden state of its target, where taps={list(self.taps)} are asked for; leave "
            "draft.head.taps out",
        )


class MTPDraft(RecursiveDraft):
    """The state of a slot is what the output head reads: the final hidden state's place in the next step."""

    config: MTPConfig

    def __init__(self, config: MTPConfig, ends: Ends, vocab: Tensor | None = None) -> None:
        super().__init__(config, ends, vocab)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = nn.RMSNorm(width, eps)
        self.hnorm = nn.RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = Attention(
            width,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.rotary(),
            qk_norm_eps=eps if config.qk_norm else None,
            bias=config.attention_bias,
        )
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = MLP(width, config.mlp_width)
        self.norm = nn.RMSNorm(width, eps)

    def fuse(self, features: Tensor) -> Tensor:
        """As `RecursiveDraft` says."""
        return features[:, :, 0].to(self.dtype)

    def advance(self, state: Tensor, tokens: Tensor, positions: Tensor, extend: Extend) -> Tensor:
        """As `RecursiveDraft` says."""
        x = self.eh_proj(torch.cat([self.enorm(self.embed(tokens)), self.hnorm(state)], -1))
        x = x + self.self_attn(self.input_layernorm(x), positions, extend)
        return self.norm(x + self.mlp(self.post_attention_layernorm(x)))

    def normed(self, state: Tensor) -> Tensor:
        """As `RecursiveDraft` says."""
        return state
