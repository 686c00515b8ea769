"""DFlash2 (z-lab; vLLM pull request 52816): DFlash with two parts more. Short convolutions around attention and MLP let
a slot of a block read the slot before it. A selector goes by the token before to choose among the k candidates of a
slot, those of the largest logits U:

    score_t(c) = U_t[c] + <A[token before] * H h_t, B[c]>        h_t the final state of slot t, c a candidate

To draft two tokens behind a, whose slots have the candidates {b, c} and {d, e}: b or c by score_1, and d or e by
score_2, where the token before is what was chosen first. What is no candidate is never drafted.

In training all other tokens keep their logits U, so that one objective teaches what becomes a candidate and which one
is chosen; published trainers add a loss of U to one of the k scores (speculators, models/dflash2/metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from decode.common.typed_config import require
from decode.drafters.base import Batch, Step
from decode.drafters.dspark import BlockLayer, DSparkConfig, DSparkDraft
from decode.drafters.head_draft import Few
from decode.drafters.layers import Extend

if TYPE_CHECKING:
    from decode.models.load import ModelDescription

GROUP, TAPS = 16, 2
"""Of a convolution, as published (z-lab/dflash, config.json of Qwen3.8-27B-DFlash2)."""


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DSparkConfig):
    """Shape of a DFlash2 head; `markov_rank` is the selector's."""

    family: str = "dflash2"
    candidates: Few
    """Tokens k that the selector chooses from in each slot."""
    conv_group: Few = GROUP
    """Neighbouring channels that share what the input adds to their kernels."""
    conv_taps: Few = TAPS
    """Slots that a convolution reads, the slot itself and those before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        drafted = self.draft_vocab_size or self.vocab_size
        require(
            self.markov_rank > 0,
            "markov_rank=0 leaves the selector of dflash2 without weights; use draft=dflash, or a rank of 1 or more",
        )
        require(
            self.candidates <= drafted,
            f"candidates={self.candidates} are chosen in each slot, and the draft knows {drafted} tokens; use fewer",
        )
        require(
            self.hidden_size % self.conv_group == 0,
            f"conv_group={self.conv_group} does not divide the hidden_size={self.hidden_size}; use a divisor of it",
        )
        require(
            (self.layout, self.confidence) == ("fill_in", False),
            f"layout={self.layout} and confidence={self.confidence}, and dflash2 is laid out as DFlash is, without "
            "chances of acceptance; use draft=dspark for those",
        )

    @classmethod
    def settled(cls, asked: Mapping[str, Any], target: ModelDescription) -> dict[str, Any]:
        """As published, but that groups divide the width of the target."""
        return {"layout": "fill_in", "confidence": False, "conv_group": gcd(GROUP, target.hidden_size)}


class BlockConvolution(nn.Module):
    """Short convolutions over the slots of a block before and after a sublayer, by numbers that its input gives:

    y_t = sum over taps j of (base[j] + delta_t[j, group]) * x_(t - j), where x is 0 before the block.
    """

    def __init__(self, width: int, slots: int, taps: int, group: int) -> None:
        """It starts as the identity."""
        super().__init__()
        self.slots, self.group = slots, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.base_kernel.data[:, 0] = 1
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, normed: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """normed (B, M * S, d) -> (B, M * S, d), what the sublayer makes of it; M blocks of S slots."""
        delta = self.kernel_projection(normed).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        before, after = (self.base_kernel + delta.repeat_interleave(self.group, -1)).unbind(-3)
        return self._over(sublayer(self._over(normed, before)), after)

    def _over(self, x: Tensor, kernel: Tensor) -> Tensor:
        """x (B, M * S, d) by kernel (B, M * S, taps, d)."""
        blocks = x.unflatten(1, (-1, self.slots))
        kernels = kernel.unflatten(1, (-1, self.slots)).unbind(-2)
        moved = (pad(blocks, (0, 0, tap, 0))[:, :, : self.slots] for tap in range(len(kernels)))
        return torch.stack([one * by for one, by in zip(moved, kernels, strict=True)]).sum(0).flatten(1, 2)


class ConvolvedLayer(BlockLayer):
    """A layer of a block whose attention and MLP stand between convolutions; those of the context's keys and values
    do not."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        sizes = (config.hidden_size, config.slots, config.conv_taps, config.conv_group)
        self.attention_conv, self.mlp_conv = BlockConvolution(*sizes), BlockConvolution(*sizes)

    def forward(self, x: Tensor, positions: Tensor, extend: Extend) -> Tensor:
        """x (B, M * S, d), positions (B, M * S) -> (B, M * S, d)."""
        x = x + self.attention_conv(self.input_layernorm(x), lambda u: self.self_attn(u, positions, extend))
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


class CandidateSelector(nn.Module):
    """A, H and B of the score."""

    def __init__(self, width: int, vocab: int, drafted: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(vocab, rank)
        self.successor_codebook = nn.Embedding(drafted, rank)
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        nn.init.normal_(self.predecessor_codebook.weight, std=0.02)
        nn.init.zeros_(self.successor_codebook.weight)  # training starts from DFlash


class DFlash2Draft(DSparkDraft):
    """Both faces; what is known of the token before is A[token] * H h, which the slot's own state tells too."""

    config: DFlash2Config

    def new_layer(self) -> BlockLayer:
        """With convolutions."""
        return ConvolvedLayer(self.config)

    def add_bias(self, rank: int, drafted: int) -> None:
        """The selector."""
        sizes = (self.config.hidden_size, self.config.vocab_size, drafted, rank)
        self.candidate_selector = CandidateSelector(*sizes)

    def known(self, states: Tensor, before: Tensor) -> Tensor:
        """A[before] * H states: (..., rank)."""
        selector = self.candidate_selector
        return selector.predecessor_codebook(before) * selector.hidden_projection(states)

    def biased(self, logits: Tensor, known: Tensor) -> Tensor:
        """The logits, those of the candidates with what the selector adds."""
        found, match = self._candidates(logits, known)
        return logits.to(match.dtype).scatter_add(-1, found.indices, match)

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """DSpark's steps."""
        return (replace(step, drafts_by=self._chosen) for step in super().unroll(batch))

    def _chosen(self, hidden: Tensor) -> Tensor:
        states, known = hidden.split([self.config.hidden_size, self.config.markov_rank], -1)
        return self.drafted(self.unbiased(states), known)

    def drafted(self, logits: Tensor, known: Tensor) -> Tensor:
        """The scores of the candidates, and -inf for all other tokens."""
        found, match = self._candidates(logits, known)
        none = match.new_full((*match.shape[:-1], logits.shape[-1]), -torch.inf)
        return none.scatter(-1, found.indices.expand_as(match), found.values.to(match) + match)

    def _candidates(self, logits: Tensor, known: Tensor) -> tuple[torch.return_types.topk, Tensor]:
        """Of logits (..., V_draft) the best k, and what is added to each of them (..., k), in float32 or finer: of a
        logit of 20 bfloat16 keeps eighths, and most of what is added is less."""
        found = logits.topk(self.config.candidates, -1)
        after = self.candidate_selector.successor_codebook(found.indices.to(known.device))
        match = (after @ known[..., None])[..., 0].to(logits.device)
        return found, match.to(torch.promote_types(logits.dtype, torch.float32))
