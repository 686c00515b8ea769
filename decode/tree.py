"""What a drafter proposes: tokens with a parent array. Node 0 is `pending`, the last committed token.

Parent arrays and masks only, never sentinel ids: padding short paths with token 0 has let a pad be accepted elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Drawn = Literal["arbitrary", "iid", "swor"]


@dataclass(frozen=True)
class Tree:
    """One tree of N nodes per row, the same shape in every row."""

    tokens: Tensor
    """(B, N) int64, node 0 = pending."""
    parents: tuple[int, ...]
    """Parent of each node, topologically sorted; -1 for node 0."""
    drawn: Drawn = "arbitrary"
    """How the children of a node were drawn: any way at all, independently from q, or from q without replacement."""
    log_q: Tensor | None = None
    """(B, N, V): row i is the very law node i's children were drawn from; None where nobody needs it."""

    @property
    def num_nodes(self) -> int:
        """N, pending included."""
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Every node's parent is the node before it."""
        return self.parents == chain_parents(self.num_nodes)

    @property
    def depths(self) -> tuple[int, ...]:
        """Edges between each node and pending."""
        return tree_depths(self.parents)

    @property
    def max_depth(self) -> int:
        """The most draft tokens that one verdict can accept."""
        return max(self.depths)


def chain_parents(num_nodes: int) -> tuple[int, ...]:
    """Parents of a chain: pending, then each token after the one before."""
    return tuple(range(-1, num_nodes - 1))


@cache
def tree_depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Depth of each node; raises ValueError where the array is not topologically sorted with one root, node 0."""
    if not parents or parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents) if node):
        raise ValueError(
            f"parents={parents} is no topologically sorted tree: node 0 has parent -1, others an earlier node"
        )
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return tuple(depths)


@cache
def ancestors(parents: tuple[int, ...]) -> Tensor:  # (N, N) bool
    """ancestors[i, j]: node j is node i or stands above it, so i attends to j."""
    above = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            above[node] |= above[parent]
    return above
