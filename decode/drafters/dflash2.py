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

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from decode.common.typed_config import require
from decode.drafters.block_layers import BlockLayer, ConvolvedLayer
from decode.drafters.dspark import DSparkConfig, DSparkDraft
from decode.drafters.head_config import Few

if TYPE_CHECKING:
    from decode.models.describe import ModelDescription

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
    picks = True

    def new_layer(self) -> BlockLayer:
        return ConvolvedLayer(self.config, self.config.slots, self.config.conv_taps, self.config.conv_group)

    def add_bias(self, rank: int, drafted: int) -> None:
        sizes = (self.config.hidden_size, self.config.vocab_size, drafted, rank)
        self.candidate_selector = CandidateSelector(*sizes)

    def known(self, states: Tensor, before: Tensor) -> Tensor:
        """A[before] * H states: (..., rank)."""
        selector = self.candidate_selector
        return selector.predecessor_codebook(before) * selector.hidden_projection(states)

    @property
    def head_weights(self) -> tuple[Tensor, ...]:
        return tuple(self.candidate_selector.successor_codebook.parameters())

    def biased(self, logits: Tensor, known: Tensor) -> Tensor:
        """The logits, those of the candidates with what the selector adds."""
        found, match = self._candidates(logits, known)
        return logits.to(match.dtype).scatter_add(-1, found.indices, match)

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
