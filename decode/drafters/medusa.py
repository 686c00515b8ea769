"""Medusa (Cai et al. 2024): independent heads on the target's final hidden state, head i of which drafts the i-th token
after pending, whatever the tokens between are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from decode.common.typed_config import require
from decode.drafters.base import Batch, Step, judged
from decode.drafters.drafting import AtOnce, Steps
from decode.drafters.head_config import Few, HeadConfig
from decode.drafters.head_draft import HeadDraft
from decode.drafters.layers import Slots
from decode.models.output_head import Ends


@dataclass(frozen=True, kw_only=True)
class OneStateConfig(HeadConfig):
    """Shape of heads on one hidden state, each with residual layers of its own."""

    mlp_layers: Few = 1
    """Residual layers of each head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.taps) == 1,
            f"{self.family} reads one hidden state of its target, and taps={list(self.taps)} are {len(self.taps)}: the "
            "others would be read for nothing. Leave draft.head.taps out for the final one, or name one",
        )


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(OneStateConfig):
    """Shape of Medusa's heads; attention's fields are of no use here."""

    family: str = "medusa"
    muon_lr: ClassVar[float | None] = 2e-2
    """Held-out tau estimates after 41k tokens at 1e-2, 2e-2 and 4e-2: 1.74, 1.96, 2.00 (two seeds each;
    docs/how-to/train_a_draft.md)."""
    bias: bool = True
    """The residual layers have biases."""
    own_heads: bool = False
    """Each head has an output head of its own, as published ones do; else all draft with the target's."""

    @property
    def has_own_head(self) -> bool:
        return self.own_heads


class Residual(nn.Module):
    """x + SiLU(W x + b). Starts as the identity, so that a head on the final state starts as the target's own."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias)
        for weight in self.linear.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return x + nn.functional.silu(self.linear(x))


def residuals(width: int, layers: int, bias: bool = True) -> nn.Sequential:
    """So many layers, each with weights of its own."""
    return nn.Sequential(*(Residual(width, bias) for _ in range(layers)))


class MedusaDraft(HeadDraft):
    """Nothing is cached, and pending is not looked at."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, ends: Ends, vocab: Tensor | None = None) -> None:
        super().__init__(config, ends, vocab)
        self.most_tokens = config.depth
        width, drafted = config.hidden_size, config.draft_vocab_size or config.vocab_size
        self.heads = nn.ModuleList(residuals(width, config.mlp_layers, config.bias) for _ in range(config.depth))
        if config.own_heads:
            self.lm_heads = nn.ModuleList(nn.Linear(width, drafted, bias=False) for _ in range(config.depth))

    def head_of(self, index: int) -> Callable[[Tensor], Tensor]:
        """What makes hidden (..., d) of the head of that number logits (..., V_draft)."""
        return cast(nn.Linear, self.lm_heads[index]) if self.config.own_heads else self.head

    def drafted(self, state: Tensor) -> Tensor:
        """state (B, d) -> logits (B, K, V) of all heads; the target's output head reads all of them at once."""
        hidden = [head(state) for head in self.heads]
        if not self.config.own_heads:
            return self.logits(torch.stack(hidden, 1))
        return self.widened(torch.stack([self.head_of(index)(one) for index, one in enumerate(hidden)], 1))

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """A step per head: that of head i (from 0) drafts token t + 2 + i at slot t, judged by row t + 1 + i."""
        assert batch.features is not None
        state = batch.features[:, :, 0].to(self.dtype)
        for index, head in enumerate(self.heads):
            rows, valid = judged(batch, 1 + index)
            yield Step(
                self.layered(head, state),
                self.head_of(index),
                rows,
                valid,
                self.vocab,
                head_weights=tuple(self.lm_heads[index].parameters()) if self.config.own_heads else (),
            )

    def steps(self, slots: Slots, read: Tensor, ends: Tensor, features: Tensor) -> Steps:
        return AtOnce(lambda: self.drafted(features[:, -1, 0].to(self.dtype)))
