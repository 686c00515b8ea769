"""Medusa (Cai et al. 2024): independent heads on the target's final hidden state, head i of which drafts the i-th token
after pending, whatever the tokens between are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from decode.common.typed_config import require
from decode.drafters.base import Batch, Step, judged
from decode.drafters.drafting import Above, Steps
from decode.drafters.head_draft import Few, HeadConfig, HeadDraft
from decode.drafters.layers import Extend, Slots
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


class Residual(nn.Module):
    """x + SiLU(W x + b). Starts as the identity, so that a head on the final state starts as the target's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return x + nn.functional.silu(self.linear(x))


def residuals(width: int, layers: int) -> nn.Sequential:
    """So many layers, each with weights of its own."""
    return nn.Sequential(*(Residual(width) for _ in range(layers)))


class MedusaDraft(HeadDraft):
    """Nothing is cached, and pending is not looked at."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, ends: Ends, vocab: Tensor | None = None) -> None:
        super().__init__(config, ends, vocab)
        self.most_tokens = config.depth
        self.heads = nn.ModuleList(residuals(config.hidden_size, config.mlp_layers) for _ in range(config.depth))

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """A step per head: that of head i (from 0) drafts token t + 2 + i at slot t, judged by row t + 1 + i."""
        assert batch.features is not None
        state = batch.features[:, :, 0].to(self.dtype)
        for index, head in enumerate(self.heads):
            rows, valid = judged(batch, 1 + index)
            yield Step(head(state), self.head, rows, valid, self.vocab, head_is_frozen=True)

    def read(self, tokens: Tensor, features: Tensor, positions: Tensor, extends: list[Extend]) -> None:
        """Nothing is kept of earlier slots."""

    def steps(self, slots: Slots, read: Tensor, ends: Tensor, features: Tensor) -> Steps:
        """The passes of one round."""
        return MedusaSteps(self, features)


@dataclass
class MedusaSteps:
    """One round: the heads' distributions at the last slot, each the same at every node of its depth."""

    draft: MedusaDraft
    features: Tensor
    logits_of_heads: Tensor = field(init=False)
    """(B, K, V) logits of all heads: one product with the output head, which costs as much as that of a single row."""

    def first(self) -> Tensor:
        """All heads at once."""
        state = self.features[:, -1, 0].to(self.draft.dtype)
        self.logits_of_heads = self.draft.logits(torch.stack([head(state) for head in self.draft.heads], 1))
        return self.logits_of_heads[:, :1]

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        """Those of the head of this depth."""
        return self.logits_of_heads[:, depth : depth + 1].expand(-1, tokens.shape[1], -1)
