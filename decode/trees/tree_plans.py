"""How a round spends its draft tokens: a tree known beforehand, or one that grows where the draft is confident."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated

from pydantic import Field

from decode.common.typed_config import require
from decode.trees import MOST_NODES
from decode.trees.tree import chain_parents, tree_depths

BEAM = 4  # nodes that a dynamic tree expands a level: a beam of 8 gives no more tokens (see drafters/trees.py)


@dataclass(frozen=True)
class Static:
    """The same tree in every row and round: the j-th child of a node takes the draft's j-th candidate there."""

    parents: Annotated[tuple[int, ...], Field(max_length=MOST_NODES + 1)]
    """Of each node, -1 for node 0; numbered level by level."""

    def __post_init__(self) -> None:
        depths = tree_depths(self.parents)
        require(
            list(depths) == sorted(depths),
            f"parents={self.parents} have depths {depths}; number the nodes of a tree level by level",
        )

    @property
    def depth(self) -> int:
        """Draft tokens on the longest path."""
        return max(tree_depths(self.parents))

    @property
    def num_nodes(self) -> int:
        """Nodes, pending included."""
        return len(self.parents)

    @property
    def num_read(self) -> int:
        """Inner nodes but pending."""
        return len(set(self.parents)) - (2 if self.num_nodes > 1 else 1)

    @property
    def is_chain(self) -> bool:
        """One candidate everywhere."""
        return self.parents == chain_parents(len(self.parents))

    def cut(self, depth: int) -> Static:
        """Nodes are numbered level by level, so the deeper ones are the last ones."""
        kept = sum(level <= depth for level in tree_depths(self.parents))
        return self if kept == len(self.parents) else Static(self.parents[:kept])


@dataclass(frozen=True)
class Dynamic:
    """The `num_nodes` nodes of highest cumulative draft probability, `beam` nodes expanded a level (EAGLE-2)."""

    depth: Annotated[int, Field(ge=1, le=MOST_NODES)]
    beam: Annotated[int, Field(ge=1, le=MOST_NODES)]
    num_nodes: Annotated[int, Field(ge=1, le=MOST_NODES + 1)]

    @property
    def is_chain(self) -> bool:
        """Its nodes are where the draft puts them."""
        return False

    @property
    def num_read(self) -> int:
        """All nodes that are expanded, kept or not."""
        return self.beam * (self.depth - 1)

    def cut(self, depth: int) -> Dynamic:
        """Fewer levels."""
        return self if depth >= self.depth else Dynamic(depth, self.beam, min(self.num_nodes, 1 + depth * self.beam))


Shape = Static | Dynamic
"""A plan of one round's tree. Node 0 is pending and counts among the nodes. `num_read` are those that have children,
which a draft LM reads: the slots that its cache needs beyond the text."""


@cache
def chain(num_draft_tokens: int) -> Static:
    """k tokens, one after another."""
    return Static(chain_parents(num_draft_tokens + 1))


def k_ary(branching: list[int]) -> Static:
    """Every node of level d has branching[d] children; numbered level by level."""
    parents, level = [-1], [0]
    for width in branching:
        children = [node for node in level for _ in range(width)]
        level = list(range(len(parents), len(parents) + len(children)))
        parents += children
    return Static(tuple(parents))


def comb(widths: list[int]) -> Static:
    """widths[d] candidates at depth d, all of them under the first candidate of the depth before."""
    parents, above = [-1], 0
    for width in widths:
        first = len(parents)
        parents += [above] * width
        above = first
    return Static(tuple(parents))


def parse(tree: str | Shape, num_draft_tokens: int, tree_nodes: int) -> Shape:
    """The plan that `tree`, as SamplingConfig takes it, names: chain, branching factors such as 3x2x1, or dynamic.

    `num_draft_tokens` is the depth of chain and dynamic, `tree_nodes` the draft nodes of dynamic.
    """
    if not isinstance(tree, str):
        return tree
    if tree == "chain":
        return chain(num_draft_tokens)
    if tree == "dynamic":
        return Dynamic(num_draft_tokens, min(tree_nodes, BEAM), 1 + tree_nodes)
    return k_ary([int(factor) for factor in tree.split("x")])
