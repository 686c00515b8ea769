"""Weights that are zero and stay so: the smallest of each matrix, left out of every pass.

A matrix is replaced by a product with its mask (torch's parametrizations), so that no optimizer, weight decay, average
or engine has to know: whatever they make of a left-out weight is not read. Gradients of it are zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import L1Unstructured
from transformers import PreTrainedModel

from decode.models.structure import layers_of
from train.drafts.pruning.pruning_config import PruningConfig


class KeptWeights(nn.Module):
    """From a matrix to the one that passes see."""

    kept: Tensor

    def __init__(self, kept: Tensor) -> None:
        """kept (rows, columns) bool; saved with the weights, so that a resumed run has the same zeros."""
        super().__init__()
        self.register_buffer("kept", kept)

    def forward(self, weight: Tensor) -> Tensor:
        """Zeros where nothing is kept."""
        return torch.where(self.kept, weight, 0.0)


def put_zeros(model: PreTrainedModel, pruning: PruningConfig) -> None:
    """Let the layers' matrices have `pruning.sparsity` of zeros from now on; embedding, head and norms stay whole."""
    for matrix in _matrices(model):
        kept = kept_places(matrix.weight.detach(), pruning)
        parametrize.register_parametrization(matrix, "weight", KeptWeights(kept))


def kept_places(weight: Tensor, pruning: PruningConfig) -> Tensor:  # (rows, columns) -> the same, bool
    """The largest of a matrix by absolute value, or two of every four neighbours of a row."""
    assert pruning.sparsity is not None
    if pruning.pattern is None:
        found = L1Unstructured(amount=pruning.sparsity).compute_mask(weight, torch.ones_like(weight))
        return found.bool()
    fours = weight.abs().unflatten(1, (-1, 4))
    largest = torch.zeros_like(fours, dtype=torch.bool).scatter(2, fours.topk(2, dim=2).indices, True)
    return largest.flatten(1)


def has_zeros(model: PreTrainedModel) -> bool:
    """Whether `put_zeros` did."""
    return any(isinstance(module, KeptWeights) for module in model.modules())


def fix_zeros(model: PreTrainedModel) -> None:
    """Make matrices with lasting zeros plain again: what is saved. Others stay as they are."""
    for matrix in [one for one in model.modules() if parametrize.is_parametrized(one, "weight")]:
        parametrize.remove_parametrizations(matrix, "weight")


def zero_share(model: PreTrainedModel) -> float:
    """Zeros among the weights of the layers' matrices."""
    weights = [matrix.weight.detach() for matrix in _matrices(model)]
    return sum(int((one == 0).sum()) for one in weights) / sum(one.numel() for one in weights)


def _matrices(model: PreTrainedModel) -> Iterator[nn.Linear]:
    return (one for layer in layers_of(model) for one in layer.modules() if isinstance(one, nn.Linear))
