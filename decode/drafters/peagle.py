"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts all tokens of a round in one pass. Behind the last true slot
stand masks, one for each further token: a mask's embedding in place of a token's, learned hidden states in place of the
target's. To draft 3 tokens behind token a, which the target's states h led to:

    [(a, h), (mask, learned), (mask, learned)]

Slot k drafts token a + k + 1. A mask sees the true slots and the masks before its own. That is the attention of
EAGLE-3's training-time test, in which a step sees the true slots and its own slot of the steps before, but no step
waits for another: one pass, whose tokens do not know each other, for a deeper network in place of many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from decode.common.progress import get_logger
from decode.common.typed_config import require
from decode.drafters.base import Batch, Step, judged, shifted
from decode.drafters.block_layers import BlockLayer
from decode.drafters.drafting import AtOnce, Steps
from decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from decode.drafters.head_config import Few, HeadConfig
from decode.drafters.layers import Extend, Mix, Slots
from decode.drafters.unrolled import Unrolled
from decode.models.mask_token import check_row, is_zero, usual_mask
from decode.models.output_head import Ends

if TYPE_CHECKING:
    from decode.models.describe import ModelDescription

log = get_logger("train")


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """Shape of a P-EAGLE head; `depth` is the number of tokens that a pass drafts."""

    family: str = "peagle"
    is_recursive: ClassVar[bool] = False
    muon_lr: ClassVar[float | None] = None
    layers: Few
    """Decoder layers, of which the first is EAGLE-3's."""
    mask_token: Annotated[int, Field(ge=0)] | None = None
    """Token whose row of the target's embedding is the mask; None is a vector of the head's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_row(self.mask_token, self.vocab_size)
        require(
            self.depth >= 2,
            f"depth={self.depth} has no mask, behind which peagle drafts all tokens but the first; use draft=eagle3, "
            "or a depth of 2 or more",
        )
        require(
            not self.norm_output,
            "norm_output=true is about what EAGLE-3 feeds back, and peagle feeds nothing back; leave it out",
        )

    @classmethod
    def settled(cls, asked: Mapping[str, Any], target: ModelDescription) -> dict[str, Any]:
        """The norms of EAGLE-3.1 but for that of the output, which nothing reads, and a mask that engines can embed."""
        own: dict[str, Any] = {"norm_output": False}
        if asked["fc_norm"] is None:
            own["fc_norm"] = not asked["norm_before_fc"]
        if asked["mask_token"] is None:
            own["mask_token"] = usual_mask(target)
        return own

    def between(self, ends: Ends, path: str) -> HeadConfig:
        """With a learned mask where the token's row is zeros, which says nothing to any layer."""
        if not is_zero(self.mask_token, ends):
            return self
        log.warning(
            "the embedding of token %d in %s is all zeros, so the mask is a vector that is learned, and no engine "
            "loads the head; draft.head.mask_token=ID names another token that no text holds",
            *(self.mask_token, path),
        )
        return replace(self, mask_token=None)


class PEagleDraft(Eagle3Draft):
    """The cache holds true slots; the masks of a round lie behind them."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig, ends: Ends, vocab: Tensor | None = None) -> None:
        super().__init__(config, ends, vocab)
        self.most_tokens, self.num_cached = config.depth, config.layers
        self.layers = nn.ModuleList(
            BlockLayer(config, config.qk_norm, config.attention_bias) for _ in range(config.layers - 1)
        )
        # modules rather than bare parameters: engines gather sharded weights when modules are called
        self.mask_hidden = nn.Embedding(1, len(config.taps) * config.hidden_size)
        nn.init.normal_(self.mask_hidden.weight, std=0.02)
        if config.mask_token is None:
            self.mask = nn.Embedding(1, config.hidden_size)
            nn.init.normal_(self.mask.weight, std=0.02)

    # both faces

    def masks(self, like: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(states, embedded) (B, count, d) that masks start from, beside states like (B, T, d)."""
        none, token = torch.zeros(1, 1, dtype=torch.long, device=like.device), self.config.mask_token
        learned = self.fuse(self.mask_hidden(none).unflatten(-1, (len(self.taps), -1)))
        embedded = self.mask(none) if token is None else self.embed(none + token)
        shape = (like.shape[0], count, like.shape[2])
        return learned.expand(shape), embedded.to(like.dtype).expand(shape)

    def states(self, state: Tensor, embedded: Tensor, positions: Tensor, extends: list[Extend]) -> Tensor:
        """state, embedded (B, T, d), positions (B, T) -> (B, T, d) behind all layers; `extends` one for each."""
        state = self.through(state, embedded, positions, extends[0])
        for layer, extend in zip(self.layers, extends[1:], strict=True):
            state = layer(state, positions, extend)
        return state

    # training face

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """`depth` steps of T slots, none of which waits for the one before: step s of slot t drafts token t + 2 + s,
        judged by row t + 1 + s. Steps behind the first are of masks, and share what comes before the layers."""
        assert batch.features is not None
        unrolled = Unrolled(batch.document, batch.positions, self.config.attends)
        given = self.layered(self.fuse, batch.features), self.embed(shifted(batch.ids, 1))
        known: list[list[Tensor]] = []
        for step in range(self.config.depth):
            if step == 1:
                given = self.masks(given[0], given[0].shape[1])
            state, *own = self.layered(self._stepped, unrolled, *given, batch.positions + step, known)
            known = [*known, own]
            rows, valid = judged(batch, 1 + step)
            yield Step(self.normed(state), self.head, rows, valid, self.vocab, head_weights=self.head_weights)

    def _stepped(
        self, unrolled: Unrolled, state: Tensor, embedded: Tensor, positions: Tensor, known: list[list[Tensor]]
    ) -> tuple[Tensor, ...]:
        """What slots come to, and keys and values of each layer; known are those of the steps before."""
        own: list[Tensor] = []

        def extend_of(layer: int) -> Extend:
            def extend(keys: Tensor, values: Tensor) -> Mix:
                own.extend((keys, values))
                before = [one for step in known for one in step[2 * layer : 2 * layer + 2]]
                return unrolled.mix(*before, keys, values)

            return extend

        return self.states(state, embedded, positions, [extend_of(one) for one in range(self.config.layers)]), *own

    # decoding face

    def num_slots(self, num_read: int) -> int:
        """The masks, whatever of them becomes a tree."""
        return self.config.depth - 1

    def read_slots(self, tokens: Tensor, features: Tensor, positions: Tensor, extends: list[Extend]) -> None:
        self.states(self.fuse(features), self.embed(tokens), positions, extends)

    def steps(self, slots: Slots, read: Tensor, ends: Tensor, features: Tensor) -> Steps:
        """A pass over the true slots not read yet and all masks, whatever is drafted of it, as in training."""

        def run() -> Tensor:
            width, count = read.shape[1], self.config.depth - 1
            positions, extends = slots.straight(ends - 1 - width, width + count, self.num_cached)
            true = self.fuse(features), self.embed(read)
            given = (torch.cat(pair, 1) for pair in zip(true, self.masks(true[0], count), strict=True))
            state, embedded = cast(tuple[Tensor, Tensor], tuple(given))
            return self.logits(self.normed(self.states(state, embedded, positions, extends)[:, width - 1 :]))

        return AtOnce(run)
