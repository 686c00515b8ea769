"""What a draft family gives to training: a blueprint, and the draft built from it. Nothing outside of this folder asks
which family it is; a new one is a file with these two classes, and a line in `registry.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from decode.common.progress import get_logger
from decode.drafters.base import Batch
from decode.forward.window import Window, window_of
from decode.models.describe import ModelDescription
from decode.models.output_head import Ends
from train.config import TrainConfig
from train.drafts.draft_config import check_window
from train.export.draft_folder import Export

log = get_logger("train")


class TrainableDraft(ABC):
    """A draft in memory, in fp32."""

    def __init__(self, module: nn.Module) -> None:
        """`module` is what is trained; its `unroll(batch)` gives the steps that the loop judges."""
        self.module = module

    def token_tables(self) -> list[nn.Parameter]:
        """Weights with a row for each token, which map no hidden state to another: Muon must not orthogonalise them."""
        tables = [child for child in self.module.modules() if isinstance(child, nn.Embedding)]
        return [weight for table in tables for weight in table.parameters()]

    def blocks(self) -> list[nn.Module]:
        """Parts with most of the weights, each entered by its own forward alone, so that an engine that shards may
        gather them one by one; of what has none it gathers all at once."""
        return []

    def calibrate(self, validation: Iterable[Batch], chunk_rows: int) -> dict[str, float]:
        """Fit what is fitted after training, on teacher-forced batches with p; what was measured of it, by name."""
        return {}

    @abstractmethod
    def recompute(self) -> None:
        """Have its layers make their activations again in the backward pass."""

    @abstractmethod
    def export(self, folder: Path, export: Export) -> None:
        """Write `folder`, which appears whole, and which `decode.load_drafter` loads."""


class Blueprint(ABC):
    """A draft as it will be built; known before any weight is loaded."""

    @property
    def engines(self) -> list[str]:
        """Lines on the engines that will load it, as far as its shape tells; of heads alone."""
        return []

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Weights that are trained or kept, tied ones once; counted without allocating them."""

    @property
    def num_trained(self) -> int:
        """Those of them that are trained, each with its optimizer state."""
        return self.num_parameters

    @property
    @abstractmethod
    def weights_per_token(self) -> int:
        """Weights that are read to draft a token: layers and output head, but not the rows of an embedding."""

    @property
    def made_from(self) -> str | None:
        """What a pruned draft was before, for the plan and the card; None for every other one."""
        return None

    @property
    @abstractmethod
    def width(self) -> int:
        """Hidden size d."""

    @property
    @abstractmethod
    def max_positions(self) -> int:
        """Longest context in tokens."""

    @property
    def attends(self) -> Window | None:
        """The window of its attention; None sees the whole text."""
        return None

    @property
    def muon_lr(self) -> float:
        """Peak rate of its matrices under Muon, from random weights, up to a width of 512 (see `train.settled`)."""
        return 1e-2

    @property
    def layers_read(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it drafts from; empty for a draft that reads tokens alone."""
        return ()

    @property
    def depth(self) -> int | None:
        """Draft tokens of a round, which it unrolls in training; None where it drafts any number, one by one."""
        return None

    @property
    def drafts_few(self) -> int | None:
        """Tokens that a language model drafts, where these are not all; a head's folder is no model of its own."""
        return None

    @property
    def wants_vocab(self) -> int | None:
        """Entries of a reduced draft vocabulary that is yet to be chosen, from the training texts."""
        return None

    def with_vocab(self, vocab: Tensor) -> Blueprint:
        """The same with the tokens chosen: (V_draft,) ascending target ids."""
        raise NotImplementedError(f"{type(self).__name__} drafts every token")

    @abstractmethod
    def build(self, ends: Ends | None) -> TrainableDraft:
        """From torch's global generator or from saved weights; a draft with `layers_read` stands between the target's
        `ends`."""


Family = Callable[[TrainConfig, ModelDescription | None, PreTrainedTokenizerBase | None], Blueprint]
"""The draft that a configuration means; UserError where there is no such draft."""


def asked_window(cfg: TrainConfig, context: int) -> Window | None:
    """That of the settings, for a draft that knows so many positions; ConfigError where it knows no more than the
    window holds."""
    size = cfg.draft.window
    if size is None:
        return None
    check_window(size, context, "the draft's context")
    if size >= cfg.sequence_length:
        log.warning(
            "draft.window=%d and sequence_length=%d: no training sequence is longer than the window, so the draft is "
            "trained as one without, and drafts with it. Train on longer sequences where texts will be longer",
            size, cfg.sequence_length,
        )  # fmt: skip
    return window_of(size, cfg.draft.sinks)
