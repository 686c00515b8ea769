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

    def add(self, guess: Iterable[int]) -> None:
        """As much of a guess as there is room for."""
        above = 0
        for token in guess:
            node = self._children.get((above, token))
            if node is None:
                if len(self.tokens) == self._num_nodes:
                    return
                node = self._children[above, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
            above = node

    def padded(self) -> tuple[list[int], list[int]]:
        """(tokens, parents) with as many nodes as there may be."""
        free = self._num_nodes - len(self.tokens)
        return self.tokens + [ANY] * free, self.parents + [0] * free


def merged(guesses: Sequence[Sequence[Sequence[int]]], pending: Tensor, shape: Shape) -> Tree:
    """The tree of each row's guesses, the best one first, below pending (B, 1): of a chain the first guess, else a trie
    of all of them."""
    if shape.is_chain:
        rows = [_chain(own, shape.depth) for own in guesses]
        return Tree(torch.cat([pending, pending.new_tensor(rows)], 1), chain_parents(1 + shape.depth))
    tries = [_trie(own, shape) for own in guesses]
    both = pending.new_tensor([tokens + parents for tokens, parents in tries])  # one upload
    tokens, parents = both.chunk(2, 1)
    return Tree(torch.cat([pending, tokens[:, 1:]], 1), parents, depth_bound=shape.depth)


def _chain(guesses: Sequence[Sequence[int]], depth: int) -> list[int]:
    first = list(guesses[0][:depth]) if guesses else []
    return first + [ANY] * (depth - len(first))


def _trie(guesses: Sequence[Sequence[int]], shape: Shape) -> tuple[list[int], list[int]]:
    trie = Trie(shape.num_nodes)
    for guess in guesses:
        trie.add(guess[: shape.depth])
    return trie.padded()
