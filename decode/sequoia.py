"""The best tree known beforehand (Sequoia, Chen et al. 2024), by dynamic program over nodes, depth and siblings.

An acceptance profile a[b] is the probability that the b-th candidate at a node is the one that stands, at every node
alike. A tree then emits 1 + the sum over its nodes of the products of a along their paths, so that what a subtree adds
depends on nothing but the nodes and the levels it may use.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode.shapes import Static


def expected_tokens(parents: Sequence[int], profile: Sequence[float]) -> float:
    """Tokens a round emits, the correction or bonus token included; ranks past the profile's end never stand."""
    reach, children = [1.0], [0] * len(parents)
    for parent in parents[1:]:
        rank = children[parent]
        children[parent] += 1
        reach.append(reach[parent] * (profile[rank] if rank < len(profile) else 0.0))
    return sum(reach)


class Planner:
    """Optimal trees of every size and depth for one profile; their costs grow as levels * ranks * nodes squared."""

    def __init__(self, profile: Sequence[float]) -> None:
        self.profile = list(profile)
        self._known: dict[tuple[int, int, int], tuple[float, int]] = {}

    def tree(self, num_draft_nodes: int, depth: int) -> Static:
        """The tree of at most `num_draft_nodes` nodes beside pending, none deeper than `depth`, that emits most.

        Nodes that add nothing are left out.
        """
        parents, level = [-1], [(0, num_draft_nodes)]
        for levels in range(depth, 0, -1):
            below = []
            for node, nodes in level:
                for share in self._shares(levels, nodes):
                    below.append((len(parents), share - 1))
                    parents.append(node)
            level = below
        return Static(tuple(parents))

    def _shares(self, levels: int, nodes: int) -> list[int]:
        """How many of `nodes` each child of a node uses, itself counted, child by child."""
        shares: list[int] = []
        while share := self._best(levels, len(shares), nodes)[1]:
            shares.append(share)
            nodes -= share
        return shares

    def _best(self, levels: int, rank: int, nodes: int) -> tuple[float, int]:
        """What siblings of this rank and the later ones add with so many levels and nodes below their parent, and how
        many of the nodes the first of them uses; 0 where no sibling is worth having."""
        if levels == 0 or nodes == 0 or rank == len(self.profile):
            return 0.0, 0
        key = (levels, rank, nodes)
        if key not in self._known:
            self._known[key] = max(
                [(0.0, 0), *((self._value(levels, rank, nodes, share), share) for share in range(1, nodes + 1))],
                key=lambda choice: choice[0],
            )
        return self._known[key]

    def _value(self, levels: int, rank: int, nodes: int, share: int) -> float:
        below = self._best(levels - 1, 0, share - 1)[0]
        return self.profile[rank] * (1.0 + below) + self._best(levels, rank + 1, nodes - share)[0]
