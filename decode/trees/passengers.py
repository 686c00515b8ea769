"""Tokens that ride along in a target pass and are never verified, for Jacobi windows and probes: what the target would
say of them is handed to the drafter of the next round, and their slots, behind those of the nodes, are forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from decode.trees.tree import Tree


@dataclass(frozen=True)
class Passengers:
    """P tokens a row beside a tree of N nodes, which do not see them."""

    tokens: Tensor
    """(B, P) int64."""
    depths: Tensor
    """(1 or B, P) int64: places after pending. Two may share one, also with nodes."""
    sees: Tensor
    """(1 or B, P, N + P) bool: the nodes and passengers that each attends to, besides itself and the committed text."""

    @property
    def count(self) -> int:
        """P."""
        return self.tokens.shape[1]


def boarded(tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """tokens (B, N + P), depths (B, N + P) and visibility (B, N + P, N + P) bool of the pass over the tree's nodes and
    its passengers behind them. Raises ValueError where their shapes do not fit."""
    assert tree.passengers is not None
    riders, batch = tree.passengers, len(tree.tokens)
    _check(riders, batch, tree.num_nodes)
    tokens = torch.cat([tree.tokens, riders.tokens], 1)
    depths = torch.cat([tree.depths.expand(batch, -1), riders.depths.expand(batch, -1)], 1)
    own = torch.eye(riders.count, tree.num_nodes + riders.count, dtype=torch.bool, device=tokens.device)
    sees = riders.sees | own.roll(tree.num_nodes, 1)
    nodes = torch.nn.functional.pad(tree.ancestors, (0, riders.count))
    return tokens, depths, torch.cat([nodes.expand(batch, -1, -1), sees.expand(batch, -1, -1)], 1)


def parted(logits: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:  # (B, N + P, V) -> (B, N, V), (B, P, V)
    """What is verified, and what is heard of the passengers."""
    return logits[:, : tree.num_nodes], logits[:, tree.num_nodes :]


def _check(riders: Passengers, batch: int, num_nodes: int) -> None:
    count = riders.count
    wanted = {"tokens": (batch, count), "depths": (batch, count), "sees": (batch, count, num_nodes + count)}
    for name, shape in wanted.items():
        found = tuple(getattr(riders, name).shape)
        if found != shape and (name == "tokens" or found != (1, *shape[1:])):
            raise ValueError(
                f"passengers' {name} have shape {found}, and beside a tree of {num_nodes} nodes in {batch} rows "
                f"{count} passengers have {shape}"
            )
