"""LiLiCorr (arXiv 2608.20530): DFlash whose tokens are chosen among each slot's k likeliest by a lattice that sees
those of all slots at once (`candidate_lattice`).

To draft two tokens behind a, whose slots have the candidates {b, c} and {d, e}: b or c by their scores behind the text,
then d or e by theirs behind what was chosen. What is no candidate is never drafted, and scores alone decide among
those.

In training all tokens have a distribution, so that one objective teaches what becomes a candidate and which one is
chosen: candidates share out what DFlash gives them together by their scores, the others keep theirs. Behind a token of
the text that was no candidate of its slot a lattice has no scores, and DFlash's distribution stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from decode.common.typed_config import require
from decode.drafters.anchored_blocks import Blocks
from decode.drafters.block_layers import BlockLayer, ConvolvedLayer
from decode.drafters.candidate_lattice import CandidateLattice, Scores
from decode.drafters.dspark import DSparkConfig, DSparkDraft, Told
from decode.drafters.head_config import Few
from decode.models.output_head import Ends

if TYPE_CHECKING:
    from decode.models.describe import ModelDescription

LATTICE_HEADS = 4
MOST_ENTRIES = 1 << 25
"""Of a set of logits that candidates are taken from, 128 MB in float32."""
Positive = Annotated[float, Field(gt=0, le=1e4)]


@dataclass(frozen=True, kw_only=True)
class LiLiCorrConfig(DSparkConfig):
    """Shape of a LiLiCorr head. Sizes of the lattice are ours where they are not of a published head."""

    family: str = "lilicorr"
    candidates: Few
    """Tokens k that are chosen from in each slot."""
    lattice_width: Few
    lattice_layers: Few = 2
    lattice_heads: Few = LATTICE_HEADS
    lattice_mlp: Positive = 2.0
    """Width of the lattice's MLPs, over its own."""
    factor_dim: Few = 64
    """Of the vectors `in` and `out`."""
    logit_scale: Positive = 16.0
    """What products of two such vectors, which lie between -1 and 1, are multiplied by."""
    vector_eps: Positive = 1e-6
    """The least length that a vector is divided by."""
    conv_group: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    """As in DFlash2, of the layers of the block; 0 is without convolutions."""
    conv_taps: Annotated[int, Field(ge=0, le=64)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        drafted = self.draft_vocab_size or self.vocab_size
        require(
            self.candidates <= drafted,
            f"candidates={self.candidates} are chosen in each slot, and the draft knows {drafted} tokens; use fewer",
        )
        require(
            min(self.candidates, self.depth) >= 2,
            f"candidates={self.candidates} and depth={self.depth}: a lattice of fewer than two of either has nothing "
            "to choose from; use draft=dflash",
        )
        require(
            self.lattice_width % self.lattice_heads == 0,
            f"lattice_heads={self.lattice_heads} does not divide the lattice_width={self.lattice_width}; use a divisor",
        )
        require(
            (self.conv_taps > 0) == (self.conv_group > 0) and not self.hidden_size % (self.conv_group or 1),
            f"conv_taps={self.conv_taps} and conv_group={self.conv_group} of hidden_size={self.hidden_size}; give "
            "both, the group a divisor of the width, or 0 and 0",
        )
        require(
            (self.layout, self.confidence, self.markov_rank) == ("fill_in", False, 0),
            f"layout={self.layout}, confidence={self.confidence} and markov_rank={self.markov_rank}, and lilicorr is "
            "laid out as DFlash is, without those; use draft=dspark",
        )

    @property
    def num_known(self) -> int:
        """The scores of a slot's candidates, and which these are."""
        return 2 * self.candidates

    @classmethod
    def settled(cls, asked: Mapping[str, Any], target: ModelDescription) -> dict[str, Any]:
        """A lattice half as wide as the target."""
        width = max(1, target.hidden_size // (2 * LATTICE_HEADS)) * LATTICE_HEADS
        return {"layout": "fill_in", "confidence": False, "markov_rank": 0, "lattice_width": width}


class LiLiCorrDraft(DSparkDraft):
    """Both faces; what is known of the token before are the scores of the slot's candidates behind it."""

    config: LiLiCorrConfig
    picks = True

    def __init__(self, config: LiLiCorrConfig, ends: Ends, vocab: Tensor | None = None) -> None:
        super().__init__(config, ends, vocab)
        self.lilicorr = CandidateLattice(config)

    def new_layer(self) -> BlockLayer:
        config = self.config
        if config.conv_taps:
            return ConvolvedLayer(config, config.slots, config.conv_taps, config.conv_group)
        return BlockLayer(config)

    # both faces

    def scored(
        self, states: Tensor, before: Tensor, has_before: Tensor | None = None, logits: Tensor | None = None
    ) -> Scores:
        """Of blocks of final states (B, N, d), and what is read (B, d) of the token before the anchor, where there is
        one (B,); `logits` (B, N, V_draft) are made here where they are not at hand."""
        found, log_q = self._candidates(states, logits)
        tokens = found if self.vocab is None else self.vocab[found]
        embedded = self.embed(tokens)
        return Scores(tokens, found, *self.lilicorr(embedded, log_q, states, before, has_before))

    @torch.no_grad()
    def _candidates(self, states: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """(draft tokens (B, N, k), their log q), likeliest first; some rows of logits at a time."""
        flat = states.flatten(0, 1) if logits is None else logits.flatten(0, 1)
        found = []
        for part in flat.split(max(1, MOST_ENTRIES // (self.config.draft_vocab_size or self.config.vocab_size))):
            rows = self.unbiased(part) if logits is None else part
            best = rows.topk(self.config.candidates, -1)
            exact = torch.promote_types(rows.dtype, torch.float32)
            found.append((best.indices, best.values.to(exact) - rows.to(exact).logsumexp(-1, keepdim=True)))
        tokens, log_q = (torch.cat(one).to(states.device) for one in zip(*found, strict=True))
        return tokens.unflatten(0, states.shape[:2]), log_q.unflatten(0, states.shape[:2])

    def biased(self, logits: Tensor, known: Tensor) -> Tensor:
        """The logits, but what candidates have together is shared out by their scores."""
        rows, own, scores, is_known = self._chosen_from(logits, known)
        shared = own.logsumexp(-1, keepdim=True) + scores.log_softmax(-1)
        return logits.to(own.dtype).scatter(-1, rows, shared.where(is_known, own))

    def drafted(self, logits: Tensor, known: Tensor) -> Tensor:
        """The scores of the candidates, and -inf for all other tokens."""
        rows, own, scores, is_known = self._chosen_from(logits, known)
        none = scores.new_full((*scores.shape[:-1], logits.shape[-1]), -torch.inf)
        return none.scatter(-1, rows, scores.where(is_known, own))

    def _chosen_from(self, logits: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The candidates' rows (..., k), what logits (..., V_draft) give them, their scores, and whether they have
        any."""
        exact = torch.promote_types(logits.dtype, torch.float32)
        scores, rows = known.to(logits.device, exact).chunk(2, -1)
        rows = rows.long()
        own = logits.expand(*rows.shape[:-1], -1).gather(-1, rows).to(exact)
        return rows, own, scores, (scores != 0).any(-1, keepdim=True)

    # training face

    def joined(self, states: Tensor, blocks: Blocks, context: Tensor) -> Tensor:
        """States (B, M, N, d) with the scores behind the text's tokens; a block at the beginning of a document has no
        token before it."""
        places = (blocks.anchors - 1).clamp(min=0)
        before = context.gather(1, places[..., None].expand(-1, -1, context.shape[-1]))
        scores = self.scored(states.flatten(0, 1), before.flatten(0, 1), (blocks.positions[..., 0] > 0).flatten())
        tokens = blocks.tokens.flatten(0, 1)
        known = [scores.behind(tokens[:, slot, None], slot) for slot in range(tokens.shape[1])]
        told = torch.cat(known, 1).unflatten(0, states.shape[:2])
        return torch.cat([states.to(told.dtype), told], -1)  # rows, in bfloat16, would be others

    # decoding face

    def told(self, states: Tensor, logits: Tensor, features: Tensor) -> Told:
        """The scores of the one block of each row."""
        return self.scored(states, self.context(features[:, -1:])[:, 0], logits=logits).behind
