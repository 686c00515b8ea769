"""Several guesses at what follows, merged into one tree a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from decode.trees.tree import Tree, chain_parents
from decode.trees.tree_plans import Shape

ANY = 0
"""The token of nodes for which there is no guess: as exact as all others, since guesses are not sampled."""


class Trie:
    """Guesses that begin alike share nodes. Node 0 is pending; a node's parent stands before it."""

    def __init__(self, num_nodes: int) -> None:
        self.tokens, self.parents = [ANY], [-1]
        self._num_nodes = num_nodes
        self._children: dict[tuple[int, int], int] = {}

    @property
    def room(self) -> int:
        """Nodes that are still free."""
        return self._num_nodes - len(self.tokens)

    def add(self, guess: Iterable[int]) -> None:
        """As much of a guess as there is room for."""
        above = 0
        for token in guess:
            node = self._children.get((above, token))
            if node is None:
                if not self.room:
                    return
                node = self._children[above, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
            above = node

    def padded(self) -> tuple[list[int], list[int]]:
        """(tokens, parents) with as many nodes as there may be."""
        return self.tokens + [ANY] * self.room, self.parents + [0] * self.room


def merged(guesses: Sequence[Sequence[Sequence[int]]], pending: Tensor, shape: Shape) -> Tree:
    """The tree of each row's guesses, the best one first, below pending (B, 1): of a chain the first guess, else a trie
    of all of them."""
    tries = [Trie(shape.num_nodes) for _ in guesses]
    for trie, own in zip(tries, guesses, strict=True):
        for guess in own[:1] if shape.is_chain else own:
            trie.add(guess[: shape.depth])
    return as_tree(tries, pending, shape)


def as_tree(tries: Sequence[Trie], pending: Tensor, shape: Shape) -> Tree:
    """A trie a row below pending (B, 1); chains where `shape` is one."""
    rows = [trie.padded() for trie in tries]
    if shape.is_chain:
        tokens = pending.new_tensor([tokens for tokens, _ in rows])
        return Tree(torch.cat([pending, tokens[:, 1:]], 1), chain_parents(shape.num_nodes))
    tokens, parents = pending.new_tensor([tokens + parents for tokens, parents in rows]).chunk(2, 1)  # one upload
    return Tree(torch.cat([pending, tokens[:, 1:]], 1), parents, depth_bound=shape.depth)
