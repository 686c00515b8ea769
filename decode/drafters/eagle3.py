"""Heads of one layer that is applied to its own output (EAGLE-3 and, in `mtp`, MTP); and EAGLE-3 (Li et al. 2025), one
decoder layer over [embedding; fused low, middle and high hidden states].

Slot t starts from the target's features after token t and from token t + 1. A drafted token's node starts from what its
parent came to and from the token itself. Training unrolls exactly that (training-time test): in step s every slot
carries on from its own output of step s - 1, a token later, and sees the true slots before it and its own earlier
steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from decode.common.checked_json import Size
from decode.common.typed_config import require
from decode.drafters.base import Batch, Step, judged, shifted
from decode.drafters.drafting import Above
from decode.drafters.head_config import HeadConfig
from decode.drafters.head_draft import HeadDraft, HeadSteps
from decode.drafters.layers import MLP, Extend, Mix
from decode.drafters.unrolled import Unrolled
from decode.forward.window import Window, window_of
from decode.models.output_head import Ends

if TYPE_CHECKING:
    from decode.models.describe import ModelDescription


class RecursiveSteps(HeadSteps["RecursiveDraft"]):
    """The true slots not read yet, then nodes behind them."""

    state: Tensor
    """(B, W, d) what the nodes of the last level came to."""

    def first(self) -> Tensor:
        positions, (extend,) = self.unread()
        self.state = self.draft.advance(self.draft.fuse(self.features), self.read, positions, extend)[:, -1:]
        return self._logits()

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        """From what the parents came to."""
        if above is None:
            state = self.state
            positions, (extend,) = self.slots.straight(self.ends - 2 + depth, 1, 1)
        else:
            state = above.of_parents(self.state, tokens)
            positions = (self.ends - 2 + depth).expand_as(tokens)
            (extend,) = self.slots.nodes(self.ends - 1, above.visible, 1)
        self.state = self.draft.advance(state, tokens, positions, extend)
        return self._logits()

    def _logits(self) -> Tensor:
        return self.draft.logits(self.draft.normed(self.state))


class RecursiveDraft(HeadDraft):
    """Both faces of a recursive head but for its layer."""

    num_cached = 1
    round_steps = RecursiveSteps

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """features (B, T, n, d) -> (B, T, d) what true slots start from."""

    @abstractmethod
    def advance(self, state: Tensor, tokens: Tensor, positions: Tensor, extend: Extend) -> Tensor:
        """(B, T, d) what slots come to: from their state (B, T, d) and their tokens (B, T)."""

    @abstractmethod
    def normed(self, state: Tensor) -> Tensor:
        """state (..., d) -> what the output head reads."""

    # training face

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """`depth` steps of T slots: step s of slot t drafts token t + 2 + s, judged by row t + 1 + s."""
        assert batch.features is not None
        unrolled = Unrolled(batch.document, batch.positions, self.config.attends)
        state, known = self.layered(self.fuse, batch.features), list[Tensor]()
        for step in range(self.config.depth):
            tokens = shifted(batch.ids, 1 + step)
            state, *own = self.layered(self._advanced, unrolled, state, tokens, batch.positions + step, *known)
            known += own
            rows, valid = judged(batch, 1 + step)
            yield Step(self.normed(state), self.head, rows, valid, self.vocab, head_weights=self.head_weights)

    def _advanced(
        self, unrolled: Unrolled, state: Tensor, tokens: Tensor, positions: Tensor, *known: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(what slots come to, keys and values of the step); known are those of the steps before."""
        own: list[Tensor] = []

        def extend(keys: Tensor, values: Tensor) -> Mix:
            own.extend((keys, values))
            return unrolled.mix(*known, keys, values)

        return self.advance(state, tokens, positions, extend), own[0], own[1]

    # decoding face

    def read_slots(self, tokens: Tensor, features: Tensor, positions: Tensor, extends: list[Extend]) -> None:
        """Pass committed tokens through the layer, whose keys and values later steps look at."""
        self.advance(self.fuse(features), tokens, positions, extends[0])


LEAST_LAYERS = 8


def usual_taps(num_layers: int) -> tuple[int, int, int]:
    """What heads that list no hidden states were trained on, and engines hand them (SafeAILab/EAGLE,
    modeling_llama_kv.py; vLLM 0.32, SGLang 0.5.23, llama.cpp)."""
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """Shape of an EAGLE-3 head; the norms of EAGLE-3.1, under the names that vLLM and SGLang read, are off in heads
    that were saved before there were any."""

    family: str = "eagle3"
    is_recursive: ClassVar[bool] = True
    muon_lr: ClassVar[float | None] = 2e-2
    """Held-out tau estimates after 41k tokens at 1e-2, 2e-2 and 4e-2: 2.70, 2.93, 2.67 (three, three seeds and one;
    docs/how-to/train_a_draft.md)."""
    fc_norm: bool = False
    """Each of the target's hidden states is normalised before they are put together."""
    norm_before_fc: bool = False
    """They are normalised together, as one vector."""
    norm_output: bool = False
    """What is fed back is what the output head reads, the state behind the last norm."""
    norm_before_residual: bool = False
    """The layer adds to the state as `hidden_norm` made it (heads of the speculators library)."""
    qk_norm: bool = False
    """Queries and keys are normalised, as in Qwen3."""
    attention_bias: bool = False
    """Queries, keys and values have biases, as in Qwen2."""
    own_head: bool = False
    """It drafts with an output head of its own, as published heads do, not with the target's rows."""
    draft_window: Size | None = None
    """Last positions that its layer attends to; None is all."""
    draft_sinks: Annotated[int, Field(ge=0)] = 0
    """First positions that it sees besides."""

    @property
    def attends(self) -> Window | None:
        return window_of(self.draft_window, self.draft_sinks)

    @property
    def has_own_head(self) -> bool:
        return self.own_head

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not (self.fc_norm and self.norm_before_fc),
            "fc_norm and norm_before_fc both normalise what fc reads: each state by itself, or all as one vector. "
            "Choose one of them",
        )

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        """The usual ones; of fewer than 8 layers, where those lie side by side or are the same, the ones after a
        quarter, a half and three quarters of them."""
        if num_layers < LEAST_LAYERS:
            return round(num_layers / 4), round(num_layers / 2), round(3 * num_layers / 4)
        return usual_taps(num_layers)

    @classmethod
    def settled(cls, asked: Mapping[str, Any], target: ModelDescription) -> dict[str, Any]:
        """The norms of EAGLE-3.1."""
        norms = {"fc_norm": not asked["norm_before_fc"], "norm_output": True}
        return {name: own for name, own in norms.items() if asked[name] is None}


class Eagle3Draft(RecursiveDraft):
    """The state of a slot is the layer's output, before its last norm unless `norm_output`."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, ends: Ends, vocab: Tensor | None = None) -> None:
        super().__init__(config, ends, vocab)
        width, eps = config.hidden_size, config.rms_norm_eps
        inputs = len(config.taps) * width
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps) for _ in config.taps)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(inputs, eps)
        self.fc = nn.Linear(inputs, width, bias=False)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.self_attn = config.attention(2 * width, config.qk_norm, config.attention_bias)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = MLP(width, config.mlp_width)
        self.norm = nn.RMSNorm(width, eps)
        if config.own_head:
            self.lm_head = nn.Linear(width, config.draft_vocab_size or config.vocab_size, bias=False)

    @property
    def head_weights(self) -> tuple[Tensor, ...]:
        return tuple(self.lm_head.parameters()) if self.config.own_head else ()

    def head(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden.to(self.dtype)) if self.config.own_head else super().head(hidden)

    def fuse(self, features: Tensor) -> Tensor:
        states = features.to(self.dtype)
        if self.config.fc_norm:
            states = torch.stack([norm(states[:, :, place]) for place, norm in enumerate(self.fc_norm)], 2)
        together = states.flatten(2)
        return self.fc(self.input_norm(together) if self.config.norm_before_fc else together)

    def advance(self, state: Tensor, tokens: Tensor, positions: Tensor, extend: Extend) -> Tensor:
        return self.through(state, self.embed(tokens), positions, extend)

    def through(self, state: Tensor, embedded: Tensor, positions: Tensor, extend: Extend) -> Tensor:
        """The same from tokens as embedded (B, T, d)."""
        known = self.hidden_norm(state)
        both = torch.cat([self.input_layernorm(embedded), known], -1)
        residual = known if self.config.norm_before_residual else state
        state = residual + self.self_attn(both, positions, extend)
        state = state + self.mlp(self.post_attention_layernorm(state))
        return self.norm(state) if self.config.norm_output else state

    def normed(self, state: Tensor) -> Tensor:
        return state if self.config.norm_output else self.norm(state)
