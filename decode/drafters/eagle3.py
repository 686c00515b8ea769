"""EAGLE-3 (Li et al. 2025): one decoder layer over [embedding; fused low, middle and high hidden states], applied to
its own output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decode.drafters.head_draft import HeadConfig
from decode.drafters.layers import MLP, Attention, Extend
from decode.drafters.recursive import RecursiveDraft
from decode.models.ends import Ends


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """Shape of an EAGLE-3 head."""

    family: str = "eagle3"


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The hidden states that vLLM, SGLang and llama.cpp assume of a target with so many layers."""
    return 2, num_layers // 2, num_layers - 3


class Eagle3Draft(RecursiveDraft):
    """The state of a slot is the layer's output before its last norm."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, ends: Ends, vocab: Tensor | None = None) -> None:
        super().__init__(config, ends, vocab)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.self_attn = Attention(
            width, config.heads, config.kv_heads, config.head_dim, config.rotary(), input_width=2 * width
        )
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = MLP(width, config.mlp_width)
        self.norm = nn.RMSNorm(width, eps)

    def fuse(self, features: Tensor) -> Tensor:
        """As `RecursiveDraft` says."""
        return self.fc(features.flatten(2).to(self.dtype))

    def advance(self, state: Tensor, tokens: Tensor, positions: Tensor, extend: Extend) -> Tensor:
        """As `RecursiveDraft` says."""
        both = torch.cat([self.input_layernorm(self.embed(tokens)), self.hidden_norm(state)], -1)
        state = state + self.self_attn(both, positions, extend)
        return state + self.mlp(self.post_attention_layernorm(state))

    def normed(self, state: Tensor) -> Tensor:
        """As `RecursiveDraft` says."""
        return self.norm(state)
