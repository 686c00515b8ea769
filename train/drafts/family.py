"""What training asks of a draft family; the loop itself sees only a module with `unroll`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from transformers import PreTrainedTokenizerBase

from decode.models.load import ModelDescription
from decode.models.output_head import Ends
from train.config import TrainConfig
from train.drafts.config import DraftConfig
from train.export.draft_folder import Export

if TYPE_CHECKING:
    from peft import PeftModel


class Shape(Protocol):
    """A draft as it will be built; known before any weight is loaded."""

    @property
    def num_parameters(self) -> int:
        """Weights that are trained or kept, tied ones once; counted without allocating them."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states of the target that it drafts from."""
        ...

    @property
    def depth(self) -> int | None:
        """Draft tokens of a round, which it unrolls in training; None where it drafts any number, one by one."""
        ...


@dataclass(frozen=True)
class Built:
    """A draft in memory: the module to train, and the adapters inside it where it is trained through those."""

    module: nn.Module
    adapters: PeftModel | None = None


@dataclass(frozen=True)
class Family:
    """One trainable family."""

    shape: Callable[[TrainConfig, ModelDescription | None, PreTrainedTokenizerBase | None], Any]
    """The draft that a configuration means; UserError where there is no such draft."""
    build: Callable[[DraftConfig, Any, Ends | None], Built]
    """That draft in fp32, from torch's global generator or from a saved one; heads are given the target's ends."""
    export: Callable[[Built, Path, Export], None]
    """Write a folder, which appears whole, that `decode.load_drafter` loads."""
