"""The best tree known beforehand (Sequoia, Chen et al. 2024), by dynamic program over depth, nodes and siblings.

An acceptance profile a[d][b] is the probability that the b-th candidate of a node at depth d is the one that stands,
if the node does. A tree then emits 1 + the sum over its nodes of the products of a along their paths, so that what a
subtree adds depends on nothing but its depth, and the nodes and levels it may use. Depths past the last row are like
it: one row does for a draft that is as good at every depth, where heads on a hidden state get worse from row to row.

What a round of any shape costs follows from a few that were timed: the target's pass by nodes, the draft's by level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from decode.trees.tree import tree_depths
from decode.trees.tree_plans import Static

Profile = Sequence[Sequence[float]]


def expected_tokens(parents: Sequence[int], profile: Profile) -> float:
    """Tokens a round emits, the correction or bonus token included; ranks past a row's end never stand."""
    depths = tree_depths(tuple(parents))
    reach, children = [1.0], [0] * len(parents)
    for parent in parents[1:]:
        rank, row = children[parent], profile[_row(profile, depths[parent])]
        children[parent] += 1
        reach.append(reach[parent] * (row[rank] if rank < len(row) else 0.0))
    return sum(reach)


class Planner:
    """Optimal trees of every size and depth for one profile; their costs grow as rows * levels * ranks * nodes
    squared."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._known: dict[tuple[int, int, int, int], tuple[float, int]] = {}

    def tree(self, num_draft_nodes: int, depth: int) -> Static:
        """The tree of at most `num_draft_nodes` nodes beside pending, none deeper than `depth`, that emits most.

        Nodes that add nothing are left out.
        """
        parents, level = [-1], [(0, num_draft_nodes)]
        for at in range(depth):
            below = []
            for node, nodes in level:
                for share in self._shares(at, depth - at, nodes):
                    below.append((len(parents), share - 1))
                    parents.append(node)
            level = below
        return Static(tuple(parents))

    def _shares(self, depth: int, levels: int, nodes: int) -> list[int]:
        """How many of `nodes` each child of a node at this depth uses, itself counted, child by child."""
        shares: list[int] = []
        while share := self._best(depth, levels, len(shares), nodes)[1]:
            shares.append(share)
            nodes -= share
        return shares

    def _best(self, depth: int, levels: int, rank: int, nodes: int) -> tuple[float, int]:
        """What siblings of this rank and the later ones add with so many levels and nodes below their parent at this
        depth, and how many of the nodes the first of them uses; 0 where no sibling is worth having."""
        row = _row(self.profile, depth)
        if levels == 0 or nodes == 0 or rank == len(self.profile[row]):
            return 0.0, 0
        key = (row, levels, rank, nodes)
        if key not in self._known:
            self._known[key] = max(
                [(0.0, 0), *((self._value(row, levels, rank, nodes, share), share) for share in range(1, nodes + 1))],
                key=lambda choice: choice[0],
            )
        return self._known[key]

    def _value(self, depth: int, levels: int, rank: int, nodes: int, share: int) -> float:
        below = self._best(depth + 1, levels - 1, 0, share - 1)[0]
        return self.profile[depth][rank] * (1.0 + below) + self._best(depth, levels, rank + 1, nodes - share)[0]


def _row(profile: Profile, depth: int) -> int:
    return min(depth, len(profile) - 1)


Table = dict[Annotated[int, Field(ge=1, le=1 << 20)], Annotated[float, Field(gt=0, allow_inf_nan=False)]]
"""Seconds by size; what lies between two sizes is on the line that joins them."""


@dataclass(frozen=True)
class RoundCosts:
    """Median seconds at one context length and batch size."""

    t_target: Annotated[Table, Field(min_length=1)]
    """Target pass by number of nodes: t_target[1] is an autoregressive step."""
    t_chain: Table
    """Drafting a chain, by its length; empty where the rule takes no chains."""
    t_root: Table
    """Drafting a tree of one level, by its width; empty where the rule takes no trees."""
    t_level: Table
    """Each further level, by the nodes that the draft reads there."""

    def seconds(self, shape: Static) -> float:
        """Drafting and the target's pass."""
        return self.drafting(shape) + interpolate(self.t_target, shape.num_nodes)

    def drafting(self, shape: Static) -> float:
        """Chains cost by their length, trees by the widths of their levels."""
        if shape.depth == 0:
            return 0.0
        if shape.is_chain:
            return interpolate(self.t_chain, shape.depth)
        first, *widths = level_widths(shape)
        return interpolate(self.t_root, first) + sum(interpolate(self.t_level, width) for width in widths)


def level_widths(shape: Static) -> list[int]:
    """[children of pending, nodes read at depth 1, at depth 2, ...]."""
    depths, inner = tree_depths(shape.parents), set(shape.parents)
    read = [sum(depths[node] == depth and node in inner for node in range(len(depths))) for depth in range(max(depths))]
    return [shape.parents.count(0), *read[1:]]


def interpolate(table: Mapping[int, float], size: int) -> float:
    """Seconds at `size`: on the line between the sizes around it; past the last one on the line through the last two,
    never falling; before the first as at the first."""
    sizes = sorted(table)
    if size <= sizes[0] or len(sizes) == 1:
        return table[sizes[0]]
    above = next((one for one in sizes if one >= size), sizes[-1])
    below = sizes[sizes.index(above) - 1]
    slope = (table[above] - table[below]) / (above - below)
    return table[above] + (size - above) * (slope if size <= above else max(0.0, slope))
