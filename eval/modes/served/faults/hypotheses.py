"""What a hypothesis is: one thing that an engine may take otherwise, in a few ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.modes.served.faults.reading import Reading

Variants = Iterator[tuple[str, Reading]]
"""(what exactly, the draft read so); none where the fault cannot be there."""
HEADS = frozenset({"eagle3", "medusa", "dflash", "dspark", "mtp"})
BLOCKS = frozenset({"dflash", "dspark"})
RECURSIVE = frozenset({"eagle3", "mtp"})
ALL = HEADS | {"lm"}


@dataclass(frozen=True)
class Hypothesis:
    """One of them."""

    name: str
    forms: frozenset[str]
    variants: Callable[[Reading], Variants]
    effect: str
    """What the engine does then."""
    remedy: str
    """How to mend it."""
    is_random: bool = False
    """The engine's numbers are others than ours, so that its counters come near to ours and are not the same."""


def random_like(weight: Tensor) -> Tensor:
    """Of its shape and size, and nothing else of it."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(weight.shape, generator=generator) * weight.std(unbiased=False).clamp(min=1e-3)
