"""DSpark (arXiv 2607.05147): a block of tokens in one pass over the target's hidden states, corrected by the token
before each of them, with the chance that each is accepted. Without the correction it is DFlash (arXiv 2602.06036).

A block whose anchor is token a holds that token in slot 0 and a mask in each of the others, and is laid out in one of
two ways. To draft 3 tokens:

    anchor   [a, mask, mask]        slot k drafts token a + k + 1, slot 0 too (published DSpark)
    fill_in  [a, mask, mask, mask]  slot k drafts token a + k, slot 0 nothing (published DFlash, and engines' DFlash)

Slot k lies at position a + k either way, and sees the target's hidden states of the tokens before a, and all slots of
its block; `causal` ones (JetSpec, arXiv 2606.18394) see those before them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from decode.common.checked_json import Size
from decode.common.errors import InputError
from decode.common.typed_config import require
from decode.drafters.anchored_blocks import Blocks
from decode.drafters.base import Batch, Step
from decode.drafters.block_layers import BlockLayer
from decode.drafters.drafting import Above
from decode.drafters.head_config import Few, HeadConfig
from decode.drafters.head_draft import HeadDraft, HeadSteps
from decode.drafters.layers import Extend, under
from decode.models.hidden_states import FINAL
from decode.models.mask_token import check_row, is_zero
from decode.models.output_head import Ends

if TYPE_CHECKING:
    from decode.models.describe import ModelDescription


MOST_TAPS = 5


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(HeadConfig):
    """Shape of a DSpark head; `depth` is the number of tokens that a block drafts."""

    family: str = "dspark"
    layers: Few
    """Decoder layers."""
    markov_rank: Annotated[int, Field(ge=0, le=1 << 16)]
    """Rank of the bias that the token before gives to the next one; 0 is DFlash."""
    confidence: bool
    """Predict each token's chance of acceptance."""
    anchors: Size
    """Blocks trained per row."""
    layout: Literal["anchor", "fill_in"] = "anchor"
    """What the slots of a block draft (the head of this file)."""
    mask_token: Annotated[int, Field(ge=0)] | None = None
    """Token whose row of the target's embedding is the mask; None is a vector of the head's own."""
    causal: bool = False
    """A slot sees those of its block before it alone."""
    temperatures: tuple[Annotated[float, Field(gt=0, le=1e6)], ...] = ()
    """Of the predicted chances, by place in the round, fitted after training (train/drafts/confidence.py); () is 1
    everywhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "temperatures", tuple(self.temperatures))  # a list where it comes from JSON
        require(
            len(self.temperatures) in (0, self.depth),
            f"{len(self.temperatures)} temperatures={self.temperatures}, and a block drafts depth={self.depth} tokens",
        )
        check_row(self.mask_token, self.vocab_size)

    @property
    def slots(self) -> int:
        """Slots of a block."""
        return self.depth + (self.layout == "fill_in")

    @property
    def num_known(self) -> int:
        """Numbers that say of the token before what a slot's own state does not."""
        return self.markov_rank

    @property
    def foresees(self) -> bool:
        return self.confidence

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        """Outputs of layers round(1 + i (L - 4) / (m - 1)), i = 0 ... m - 1, counted from 0: m = 5 of a target with
        L >= 8 layers, else as many as differ. As indices of hidden states they are one higher."""
        count = min(MOST_TAPS, num_layers - 3)
        if count < 2:
            return (min(2, num_layers - 1) or FINAL,)
        return tuple(2 + round(i * (num_layers - 4) / (count - 1)) for i in range(count))

    @classmethod
    def settled(cls, asked: Mapping[str, Any], target: ModelDescription) -> dict[str, Any]:
        """The layout that published heads of its kind have."""
        return {"layout": asked["layout"] or ("anchor" if asked["markov_rank"] else "fill_in")}

    def between(self, ends: Ends, path: str) -> HeadConfig:
        """A row of zeros, as padding's often is, makes the same queries at every position: a toy's blocks came to alpha
        0.25 with it, and to 0.41 with a learned mask."""
        if is_zero(self.mask_token, ends):
            raise InputError(
                f"draft.head.mask_token={self.mask_token}, and the embedding of that token in {path} is all zeros "
                "(padding's often is). Name another token that no text holds, or none: the mask is then learned"
            )
        return self


Told = Callable[[Tensor, int], Tensor]
"""What is known (B, W, num_known) behind tokens (B, W), for the slot of that number, from 0."""


class BlockSteps(HeadSteps["DSparkDraft"]):
    """A pass over the block, then only biases. A node's logits are those of the slot that drafts behind
    its depth, with the bias of its own token."""

    states: Tensor
    """(B, N, d) of the slots that draft."""
    unbiased: Tensor
    """(B, N, V_draft)."""
    told: Told
    last: Tensor
    """(B, W) tokens of the nodes whose logits were made last."""

    def first(self) -> Tensor:
        """The pass over the block; whatever is drafted of it, all its slots are there, as in training."""
        draft, pending = self.draft, self.read[:, -1:]
        draft.read_slots(self.read, self.features, *self.unread())
        lay_out = self.slots.straight if draft.config.causal else self.slots.block
        positions, extends = lay_out(self.ends - 1, draft.config.slots, draft.num_cached)
        self.states = draft.states(pending, positions, extends)[:, 0]
        self.unbiased = draft.unbiased(self.states)
        self.told = draft.told(self.states, self.unbiased, self.features)
        return self.step(pending, 0)

    def chance(self, depth: int) -> Tensor:
        """sigmoid(c / temperature) of the token to be drafted at this depth, the one before it known."""
        draft = self.draft
        logits = draft.confidence_head(draft.paired(self.states[:, depth], self.last[:, 0]))[:, 0]
        temperatures = draft.config.temperatures
        return (logits.float() / (temperatures[depth] if temperatures else 1.0)).sigmoid()

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        """Those of the slot that drafts at this depth, with the bias of each node's own token."""
        self.last, draft = tokens, self.draft
        logits = self.unbiased[:, depth : depth + 1]
        if not draft.config.num_known:
            return draft.widened(logits.expand(-1, tokens.shape[1], -1))
        return draft.widened(draft.drafted(logits, self.told(tokens, depth)))


class DSparkDraft(HeadDraft):
    """The cache holds the keys and values that each layer makes of the target's hidden states; the block's own lie
    behind them for one round."""

    config: DSparkConfig
    round_steps = BlockSteps
    picks = False
    """Whether fewer tokens are drafted than are learned, by `picked`."""

    def __init__(self, config: DSparkConfig, ends: Ends, vocab: Tensor | None = None) -> None:
        super().__init__(config, ends, vocab)
        width, eps, rank = config.hidden_size, config.rms_norm_eps, config.markov_rank
        self.most_tokens, self.num_cached = config.depth, config.layers
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps)
        if config.mask_token is None:
            # a module rather than a bare parameter: engines gather sharded weights when modules are called
            self.mask = nn.Embedding(1, width)
            nn.init.normal_(self.mask.weight, std=0.02)
        self.layers = nn.ModuleList(self.new_layer() for _ in range(config.layers))
        self.norm = nn.RMSNorm(width, eps)
        if rank:
            self.add_bias(rank, config.draft_vocab_size or config.vocab_size)
        if config.confidence:
            self.confidence_head = nn.Linear(width + rank, 1)

    def new_layer(self) -> BlockLayer:
        """With random weights."""
        return BlockLayer(self.config)

    def add_bias(self, rank: int, drafted: int) -> None:
        """The weights of `known` and `biased`, with which training starts from DFlash."""
        self.markov_in = nn.Embedding(self.config.vocab_size, rank)
        nn.init.normal_(self.markov_in.weight, std=0.02)  # of 1, rare tokens would keep noise as their bias
        self.markov_out = nn.Linear(rank, drafted, bias=False)
        nn.init.zeros_(self.markov_out.weight)

    # both faces

    @property
    def blocks(self) -> list[BlockLayer]:
        """The layers, by the type they have here."""
        return cast(list[BlockLayer], list(self.layers))

    def context(self, features: Tensor) -> Tensor:
        """features (B, T, n, d) -> (B, T, d), from which every layer makes keys and values."""
        return self.hidden_norm(self.fc(features.to(self.dtype).flatten(2)))

    def states(self, anchors: Tensor, positions: Tensor, extends: list[Extend]) -> Tensor:
        """anchors (B, M) tokens, positions (B, M * S) -> (B, M, N, d) final states of the slots that draft."""
        slots, mask = self.config.slots, self.config.mask_token
        masks = anchors.new_full((*anchors.shape, slots - 1), mask or 0)
        first = self.embed(anchors)[:, :, None]
        rest = self.mask(masks) if mask is None else self.embed(masks)
        x = torch.cat([first, rest.to(first.dtype)], 2).flatten(1, 2)
        for layer, extend in zip(self.layers, extends, strict=True):
            x = self.layered(layer, x, positions, extend)
        return self.norm(x).unflatten(1, (-1, slots))[:, :, slots - self.config.depth :]

    def known(self, _states: Tensor, before: Tensor) -> Tensor:
        """What is known of the tokens before (...), for slots of final states (..., d): (..., rank)."""
        return self.markov_in(before)

    def paired(self, states: Tensor, before: Tensor) -> Tensor:
        """states (..., d) beside what is known of the tokens before (...): (..., d + rank)."""
        return torch.cat([states, self.known(states, before)], -1) if self.config.num_known else states

    @property
    def head_weights(self) -> tuple[Tensor, ...]:
        return tuple(self.markov_out.parameters()) if self.config.markov_rank else ()

    def head(self, hidden: Tensor) -> Tensor:
        """hidden (..., d + rank) as `paired` makes it -> logits (..., V_draft)."""
        states, known = hidden.split([self.config.hidden_size, self.config.num_known], -1)
        logits = self.unbiased(states)
        return self.biased(logits, known) if self.config.num_known else logits

    def unbiased(self, states: Tensor) -> Tensor:
        """states (..., d) -> (..., V_draft), whatever the token before."""
        return super().head(states)

    def biased(self, logits: Tensor, known: Tensor) -> Tensor:
        """logits (..., V_draft) with the bias of what is known of the tokens before (..., rank)."""
        return logits + self.markov_out(known).to(logits.device)

    def picked(self, hidden: Tensor) -> Tensor:
        """What is drafted by where the family `picks`: hidden as `head` takes it."""
        states, known = hidden.split([self.config.hidden_size, self.config.num_known], -1)
        return self.drafted(self.unbiased(states), known)

    # training face

    def joined(self, states: Tensor, blocks: Blocks, _context: Tensor) -> Tensor:
        """states (B, M, N, d) as `head` takes them, behind the text's own tokens; context (B, T, d)."""
        return self.paired(states, blocks.tokens)

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """A step for each token that the blocks at `anchors` tokens of a row draft; those are drawn anew in every
        training step, evenly spaced otherwise."""
        assert batch.features is not None
        config = self.config
        sizes = (config.anchors, config.depth, config.slots)
        blocks = Blocks.of(batch, *sizes, causal=config.causal, at_random=self.training)
        context, visible = self.context(batch.features), blocks.visible
        extends = [_behind(*layer.self_attn.keys_values(context, batch.positions), visible) for layer in self.blocks]
        states = self.states(blocks.tokens[..., 0], blocks.positions.flatten(1), extends)
        joined = self.joined(states, blocks, context)
        for drafted in range(config.depth):
            hidden = joined[:, :, drafted]
            confidence = self.confidence_head(hidden)[..., 0] if config.confidence else None
            rows, valid = blocks.rows[..., drafted], blocks.valid[..., drafted]
            more = (confidence, self.head_weights, self.picked if self.picks else None)
            yield Step(hidden, self.head, rows, valid, self.vocab, *more, begins_everywhere=False)

    # decoding face

    def told(self, states: Tensor, _logits: Tensor, _features: Tensor) -> Told:
        """Of one block in each row: states (B, N, d), logits (B, N, V_draft), features (B, W, n, d) of the tokens
        before pending."""
        return lambda tokens, slot: self.known(states[:, slot : slot + 1], tokens)

    def drafted(self, logits: Tensor, known: Tensor) -> Tensor:
        """What W nodes behind one slot are drafted from: logits (B, 1, V_draft), known (B, W, rank) -> (B, W,
        V_draft)."""
        return self.biased(logits, known)

    def num_slots(self, num_read: int) -> int:
        """The block, whatever of it becomes a tree."""
        return self.config.slots

    def read_slots(self, tokens: Tensor, features: Tensor, positions: Tensor, extends: list[Extend]) -> None:
        """Keep keys and values of committed tokens, which their own hidden states tell: the ids are not read."""
        context = self.context(features)
        for layer, extend in zip(self.blocks, extends, strict=True):
            extend(*layer.self_attn.keys_values(context, positions))


def _behind(keys: Tensor, values: Tensor, visible: Tensor) -> Extend:
    """Blocks that come after these keys and values of the context."""
    return lambda more_keys, more_values: under(
        torch.cat([keys, more_keys], 2), torch.cat([values, more_values], 2), visible
    )
