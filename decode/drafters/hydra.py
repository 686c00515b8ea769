"""Hydra (Ankner et al. 2024): Medusa's heads, each of which also reads the tokens up to the one that it drafts.

Head i starts from [state; E(pending); E(draft 1) ... E(draft i - 1)]. The state is the target's final hidden state or,
in Hydra++, what a decoder layer over the states of the whole text makes of it. Embeddings are normalised, which the
paper does not do: they are an order of magnitude smaller than states, and so are learned to be read much later. After
60 steps of 1,024 tokens on the toy's target four heads had alpha 0.73 0.73 0.72 0.72; without, 0.54 0.50 0.49
0.49.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decode.drafters.base import Batch, Step, judged, shifted
from decode.drafters.block_layers import BlockLayer
from decode.drafters.drafting import Above
from decode.drafters.head_draft import HeadDraft, HeadSteps
from decode.drafters.layers import Extend
from decode.drafters.medusa import OneStateConfig, residuals
from decode.drafters.unrolled import Unrolled
from decode.models.output_head import Ends


@dataclass(frozen=True, kw_only=True)
class HydraConfig(OneStateConfig):
    """Shape of Hydra's heads; attention's fields are those of the prefix layer."""

    family: str = "hydra"
    prefix_attention: bool = False
    """A decoder layer over the hidden states of the text before the heads (Hydra++)."""


class HydraSteps(HeadSteps["HydraDraft"]):
    """The state of the last slot, and along every path the embeddings of its tokens."""

    known: Tensor
    """(B, W, (2 + depth) * d) what the head at each node of the last level reads."""

    def first(self) -> Tensor:
        state = self.draft.states(self.features, *self.unread())[:, -1:]
        return self._go_on(state, self.read[:, -1:], 0)

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        """Of the head of this depth, behind the paths of the parents."""
        return self._go_on(self.known if above is None else above.of_parents(self.known, tokens), tokens, depth)

    def _go_on(self, above: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """(B, W, V) logits behind tokens (B, W), from what the heads above them read."""
        self.known = self.draft.with_tokens(above, tokens)
        return self.draft.logits(self.draft.heads[depth](self.known))


class HydraDraft(HeadDraft):
    """Only the prefix layer keeps keys and values: nodes are read by heads alone, which need the tokens of their path
    and nothing else."""

    config: HydraConfig
    round_steps = HydraSteps

    def __init__(self, config: HydraConfig, ends: Ends, vocab: Tensor | None = None) -> None:
        super().__init__(config, ends, vocab)
        self.most_tokens, self.num_cached = config.depth, int(config.prefix_attention)
        self.embed_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.prefix = nn.ModuleList(_prefix_layer(config) for _ in range(self.num_cached))
        self.heads = nn.ModuleList(_head(config, 1 + index) for index in range(config.depth))

    def states(self, features: Tensor, positions: Tensor, extends: list[Extend]) -> Tensor:
        """features (B, T, 1, d), positions (B, T) -> (B, T, d) what the heads of each slot start from."""
        state = features[:, :, 0].to(self.dtype)
        for layer, extend in zip(self.prefix, extends, strict=True):
            state = self.layered(layer, state, positions, extend)
        return state

    def with_tokens(self, known: Tensor, tokens: Tensor) -> Tensor:
        """known (B, W, n), tokens (B, W) -> (B, W, n + d) what the next head reads."""
        return torch.cat([known, self.embed_norm(self.embed(tokens))], -1)

    # training face

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """A step per head, with the true tokens before it: that of head i (from 0) drafts token t + 2 + i at slot t,
        judged by row t + 1 + i."""
        assert batch.features is not None
        extends: list[Extend] = [Unrolled(batch.document, batch.positions, None).mix] * self.num_cached
        known = self.states(batch.features, batch.positions, extends)
        for index, head in enumerate(self.heads):
            known = self.with_tokens(known, shifted(batch.ids, 1 + index))
            rows, valid = judged(batch, 1 + index)
            yield Step(self.layered(head, known), self.head, rows, valid, self.vocab, head_weights=self.head_weights)

    # decoding face

    def num_slots(self, num_read: int) -> int:
        """Nodes leave nothing in the cache."""
        return 0

    def read_slots(self, tokens: Tensor, features: Tensor, positions: Tensor, extends: list[Extend]) -> None:
        """Keep the states of tokens that are committed; nothing is drafted from them alone."""
        self.states(features, positions, extends)


def _head(config: HydraConfig, num_tokens: int) -> nn.Sequential:
    """From the state and so many embeddings to what the output head reads; starts as the state itself."""
    width = config.hidden_size
    fuse = nn.Linear((1 + num_tokens) * width, width, bias=False)
    nn.init.eye_(fuse.weight)  # of the first d columns; the embeddings count for nothing yet
    return nn.Sequential(fuse, *residuals(width, config.mlp_layers))


def _prefix_layer(config: HydraConfig) -> BlockLayer:
    """A decoder layer (Hydra++). Starts as the identity, as the heads do."""
    layer = BlockLayer(config, qk_norm=False)
    nn.init.zeros_(layer.self_attn.o_proj.weight)
    nn.init.zeros_(layer.mlp.down_proj.weight)
    return layer
