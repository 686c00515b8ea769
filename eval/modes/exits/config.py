"""What a user sets about `mode=exits`; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.common.typed_config import require, require_some

MOST_LAYERS = 8
"""Layers that are tried where none are named."""


@dataclass
class ExitsConfig:
    """`mode=exits`: what each early exit of a target would draft, and what that costs."""

    layers: list[int] = field(default_factory=list)
    """Layers that draft; [] tries all, of targets of ten and more at most 8 in the first two thirds. Exit
    adapters in `drafts` are tried besides."""
    draft_lengths: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 6, 8])
    """Draft lengths of which each exit has its best one."""

    def __post_init__(self) -> None:
        for name in ("layers", "draft_lengths"):
            values = getattr(self, name)
            require(len(set(values)) == len(values), f"exits.{name}={values} repeats one; name each once")
            require(all(one >= 1 for one in values), f"exits.{name}={values}; each is at least 1")
        require_some(self, "exits.", draft_lengths="[4]")

    def layers_of(self, num_layers: int) -> list[int]:
        """Those that are tried of a target with so many, its last one left to the verdict."""
        if self.layers:
            return sorted(self.layers)
        last = num_layers - 1 if num_layers <= MOST_LAYERS + 1 else 2 * num_layers // 3  # later ones hardly save
        most = min(MOST_LAYERS, last)
        return sorted({round(number * last / most) for number in range(1, most + 1)})
