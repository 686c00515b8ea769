"""The shape of a head, as its config.json has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from decode.common.checked_json import Size
from decode.common.typed_config import require
from decode.drafters.layers import Attention, Rope, Rotary
from decode.forward.window import Window
from decode.models.hidden_states import FINAL

if TYPE_CHECKING:
    from decode.models.describe import ModelDescription
    from decode.models.output_head import Ends

Few = Annotated[int, Field(ge=1, le=1 << 12)]
"""Layers, heads or tokens of a round; what builds so many modules must not be told a billion."""
Width = Annotated[int, Field(ge=1, le=1 << 24)]


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The shape of a head; families add fields of their own. Saved as config.json."""

    family: str
    hidden_size: Width
    """d of the target, and of the head."""
    vocab_size: Width
    """Tokens V of the target."""
    taps: tuple[int, ...]
    """Hidden states of the target that it drafts from (`decode.models.hidden_states`)."""
    depth: Few
    """Draft tokens that training unrolls: heads K, recursive steps S, or block size."""
    heads: Few
    kv_heads: Few
    head_dim: Width
    mlp_width: Width
    rms_norm_eps: Annotated[float, Field(ge=0, lt=1)]
    rope: Rope
    """transformers' rope_parameters."""
    max_positions: Size
    draft_vocab_size: Width | None = None
    """Tokens of a reduced draft vocabulary; None is all of them."""

    is_recursive: ClassVar[bool] = False
    """All of it drafts each token, one after another; else it runs once a round, for `depth` tokens."""
    muon_lr: ClassVar[float | None] = None
    """Peak rate of its matrices under Muon, where the family learns better at another than most."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(self.taps))  # a list where it comes from JSON
        require(self.heads % self.kv_heads == 0, f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        require(
            self.head_dim % 2 == 0,
            f"head_dim={self.head_dim} is odd, and rotary positions turn pairs of channels; use an even one",
        )

    @property
    def attends(self) -> Window | None:
        """The window of its attention; None sees the whole text."""
        return None

    @property
    def has_own_head(self) -> bool:
        """Whether it drafts with output heads of its own; else with the target's."""
        return False

    @property
    def foresees(self) -> bool:
        """Whether it predicts what becomes of its tokens."""
        return False

    @property
    def round_depth(self) -> int | None:
        """Draft tokens that a round is trained for; None where any number is drafted, one by one."""
        return self.depth

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        """The hidden states that it reads of a target with so many layers where none are named, ascending."""
        return (FINAL,)

    @classmethod
    def settled(cls, asked: Mapping[str, Any], target: ModelDescription) -> dict[str, Any]:
        """Fields of a new head that the family settles by itself, from the settings (None is unset) and the target."""
        return {}

    def refuse_target(self, target: ModelDescription) -> None:
        """InputError for a target whose layers a family cannot draft with, although it has its taps."""

    def between(self, ends: Ends, path: str) -> HeadConfig:
        """The shape of a new head at the ends of a target, in `path`; InputError where it could not use its
        embedding."""
        return self

    def attention(self, input_width: int | None = None, qk_norm: bool = False, bias: bool = False) -> Attention:
        """One layer's, with its rotary positions."""
        rope, eps = Rotary(self.head_dim, self.rope, self.max_positions), self.rms_norm_eps if qk_norm else None
        sizes = (self.hidden_size, self.heads, self.kv_heads, self.head_dim)
        return Attention(*sizes, rope, input_width=input_width, qk_norm_eps=eps, bias=bias)
