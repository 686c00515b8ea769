"""What a user sets about pruning; imports nothing heavy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from decode.common.typed_config import require, require_at_least


@dataclass
class PruningConfig:
    """Parts of `init_from` that the draft does without; what is left is trained as ever."""

    layers: int | None = None
    """Transformer layers to keep, evenly spaced from the first to the last; None keeps all."""
    mlp_width: int | None = None
    """Channels of each layer's MLP to keep, those of the largest weights; None keeps all."""
    heads: int | None = None
    """Query heads of each layer to keep, in whole groups with the key/value head that they share; None keeps all."""
    sparsity: float | None = None
    """Share of each weight matrix of the layers to set to zero, and to hold there; None sets none."""
    pattern: Literal["2:4"] | None = None
    """2:4 sets two of every four neighbours to zero, the layout that sparse tensor cores multiply faster; None sets the
    smallest weights of each matrix."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "pruning.", "layers", "mlp_width", "heads")
        require(
            self.sparsity is None or 0 < self.sparsity < 1,
            f"pruning.sparsity={self.sparsity} is the share of the weights that become zero, and none or all of them "
            "would; give one above 0 and below 1, such as 0.5, or leave it out",
        )
        require(
            self.pattern is None or self.sparsity == 0.5,
            f"pruning.pattern={self.pattern} sets half of the weights to zero, and pruning.sparsity={self.sparsity}. "
            "Set draft.pruning.sparsity=0.5 with it, or leave draft.pruning.pattern out",
        )

    @property
    def is_structured(self) -> bool:
        """Whether layers, channels or heads are left out."""
        return any(size is not None for size in (self.layers, self.mlp_width, self.heads))

    @property
    def is_asked(self) -> bool:
        """Whether anything is pruned."""
        return self.is_structured or self.sparsity is not None

    def __str__(self) -> str:
        """As a user sets it."""
        return " ".join(f"pruning.{name}={value}" for name, value in asdict(self).items() if value is not None)
