"""What a round of any shape costs, from a few that were timed: the target's pass by nodes, the draft's by level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from decode.trees.tree import tree_depths
from decode.trees.tree_plans import Static

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
