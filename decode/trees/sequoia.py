"""The best tree known beforehand (Sequoia, Chen et al. 2024), by dynamic program over depth, nodes and siblings.

An acceptance profile a[d][b] is the probability that the b-th candidate of a node at depth d is the one that stands,
if the node does. A tree then emits 1 + the sum over its nodes of the products of a along their paths, so that what a
subtree adds depends on nothing but its depth, and the nodes and levels it may use. Depths past the last row are like
it: one row does for a draft that is as good at every depth, where heads on a hidden state get worse from row to row.
"""

from __future__ import annotations

from collections.abc import Sequence

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
