"""`early_exit`: the target drafts for itself. Its first layers, with its own last norm and output head behind them,
draft a chain; the verdict's pass goes on from the hidden states that they left in the shared cache, so that no layer
reads a token twice (self-speculative decoding: Elhoushi et al. 2024, LayerSkip, arXiv:2404.16710, without its
training)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from decode.common.errors import InputError
from decode.drafters.base import Context, Drafter
from decode.drafters.drafting import visible_slots
from decode.drafters.lm_steps import lm_round
from decode.drafters.tree_drafting import propose
from decode.forward.resume import Lower, Rest, refuse_inseparable
from decode.forward.target import CachedModel
from decode.models.structure import layers_of
from decode.trees.tree import Tree

LAST = 1
"""Nodes at the end of a chain that the draft has not read: it drew the last token and stopped."""


@dataclass(frozen=True)
class EarlyExitDrafter(Drafter):
    """Drafts chains with the first layers of `model`, the target itself. Equal ones share captures."""

    model: PreTrainedModel
    exit_layer: int
    """Layers that draft."""
    adapter: nn.Module | None = None
    """What was trained to stand between them and the norm (`decode.drafters.exit_adapter`)."""
    serial: int = 0
    """Of the adapter's weights."""
    is_checked: InitVar[bool] = False
    """That the model's passes can be parted there is known."""

    family = "early_exit"
    on_host = False
    drafts_trees = False

    def __post_init__(self, is_checked: bool) -> None:
        """Raises InputError for a model whose passes cannot be parted there."""
        if not is_checked:
            refuse_inseparable(self.model, layers_of(self.model), self.exit_layer)

    def start(self, context: Context, capacity: int) -> None:
        """Room for hidden states beside the cache, which a captured round finds there."""
        self._target(context).node_pass(1, self._lower)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """Nothing: the target has read the prompts, for these layers too."""

    def prepare(self, context: Context) -> int:
        """The slots that its passes look at."""
        return visible_slots(self._target(context), context, context.shape.num_read + 1)

    def propose(self, context: Context) -> Tree:
        """A chain, whose verdict needs the rest of the layers alone."""
        assert context.shape.is_chain, context.shape
        tree = propose(lm_round(self._target(context), context, 1, self._lower), context)
        return replace(tree, rest=Rest(self.exit_layer, LAST))

    @property
    def _lower(self) -> Lower:
        return Lower(self.exit_layer, self.adapter, self.serial)

    def _target(self, context: Context) -> CachedModel:
        assert context.target is not None, "early_exit drafts by the target's passes, never within another drafter"
        if context.target.model is not self.model:
            raise InputError(
                f"this early_exit drafter was made of another {type(self.model).__name__} than the target that "
                "decodes, and it drafts by the layers of that one. Make it anew: "
                f'load_drafter("early_exit", target=MODEL, exit_layer={self.exit_layer})'
            )
        return context.target


def refuse_exit(exit_layer: int, num_layers: int, path: str) -> None:
    """InputError where a target with so many layers would leave none to the verdict."""
    if exit_layer >= num_layers:
        raise InputError(
            f"exit_layer={exit_layer}, and {path} has {num_layers} layers: what drafts must leave some to the "
            f"verdict. Choose 1 to {num_layers - 1}"
            if num_layers > 1
            else f"{path} has one layer, and early_exit leaves between two. Use another drafter"
        )
