"""What a drafter proposes: tokens with a parent array. Node 0 is `pending`, the last committed token.

Parent arrays and masks only, never sentinel ids: padding short paths with token 0 has let a pad be accepted elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from decode.forward.target import Part

Drawn = Literal["arbitrary", "iid", "swor"]


@dataclass(frozen=True)
class Passengers:
    """P tokens a row beside a tree of N nodes, which do not see them and are never verified, for Jacobi windows and
    probes: what the target would say of them is handed to the drafter of the next round, and their slots, behind those
    of the nodes, are forgotten."""

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


@dataclass(frozen=True)
class Tree:
    """One tree of N nodes per row: the same shape in every row, or each row its own."""

    tokens: Tensor
    """(B, N) int64, node 0 = pending."""
    parents: tuple[int, ...] | Tensor
    """Parent of each node, topologically sorted, -1 for node 0; (B, N) int64 where rows differ."""
    drawn: Drawn = "arbitrary"
    """How the children of a node were drawn: any way at all, independently from q, or from q without replacement."""
    log_q: Tensor | None = None
    """(B, N, V): row i is the very distribution node i's children were drawn from; None where nobody needs it."""
    depth_bound: int = 0
    """Where rows differ: no node of any row lies deeper, known without asking the device."""
    passengers: Passengers | None = None
    """Tokens that ride along in the target pass, unverified."""
    rest: Part | None = None
    """What is left of the target pass where drafting these very nodes was a part of it; None is all of it."""

    @property
    def num_nodes(self) -> int:
        """N, pending included."""
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        """Every node's parent is the node before it."""
        return isinstance(self.parents, tuple) and self.parents == chain_parents(self.num_nodes)

    @property
    def parent_ids(self) -> Tensor:
        """(1, N) or (B, N) int64 on the tokens' device; -1 for node 0."""
        if isinstance(self.parents, Tensor):
            return self.parents
        return _on_device(self.parents, self.tokens.device)

    @property
    def depths(self) -> Tensor:
        """(1, N) or (B, N) int64: edges between each node and pending."""
        if isinstance(self.parents, Tensor):
            return self.ancestors.sum(-1) - 1
        return _on_device(tree_depths(self.parents), self.tokens.device)

    @property
    def ancestors(self) -> Tensor:
        """(1, N, N) or (B, N, N) bool: [i, j] says that node j is node i or stands above it, so i attends to j."""
        if isinstance(self.parents, Tensor):
            return _ancestors_of_rows(self.parents, self.depth_bound)
        return _ancestors_on(self.parents, self.tokens.device)

    @property
    def max_depth(self) -> int:
        """The most draft tokens that one verdict can accept."""
        return self.depth_bound if isinstance(self.parents, Tensor) else max(tree_depths(self.parents))

    def parents_of_rows(self) -> list[list[int]]:
        """Parents of each row on the host; a sync where rows differ."""
        if isinstance(self.parents, Tensor):
            return self.parents.tolist()
        return [list(self.parents)] * self.tokens.shape[0]


def chain_parents(num_nodes: int) -> tuple[int, ...]:
    """Parents of a chain: pending, then each token after the one before."""
    return tuple(range(-1, num_nodes - 1))


@cache
def tree_depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Depth of each node; raises ValueError where the array is not topologically sorted with one root, node 0."""
    if not parents or parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents) if node):
        raise ValueError(
            f"parents={parents} is not a topologically sorted tree: node 0 has parent -1, others an earlier node"
        )
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return tuple(depths)


@cache
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:  # (1, N) int64
    """Uploaded once: an upload in a round would wait for the device."""
    with torch.inference_mode(mode=False):
        return torch.tensor([values], device=device)


@cache
def _ancestors_on(parents: tuple[int, ...], device: torch.device) -> Tensor:  # (1, N, N) bool
    with torch.inference_mode(mode=False):
        return ancestors(parents).to(device)[None]


@cache
def ancestors(parents: tuple[int, ...]) -> Tensor:  # (N, N) bool
    """ancestors[i, j]: node j is node i or stands above it, so i attends to j."""
    above = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            above[node] |= above[parent]
    return above


def _ancestors_of_rows(parents: Tensor, depth: int) -> Tensor:  # (B, N) -> (B, N, N) bool
    """Climb once per level; the root climbs to itself."""
    rows, nodes = parents.shape
    at = torch.arange(nodes, device=parents.device).expand(rows, nodes)
    above = torch.zeros(rows, nodes, nodes, dtype=torch.bool, device=parents.device)
    for _ in range(depth + 1):
        above = above.scatter(2, at[..., None], torch.ones_like(above[..., :1]))
        at = parents.gather(1, at).clamp(min=0)
    return above


def with_passengers(tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
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


def split_passengers(logits: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:  # (B, N + P, V) -> (B, N, V), (B, P, V)
    """Logits of the nodes, which are verified, and of the passengers."""
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
