"""Guesses merged into trees."""

from __future__ import annotations

import torch

from decode.drafters.untrained.trie import merged
from decode.trees.tree_plans import chain, k_ary

PENDING = torch.tensor([[8], [9]])


def test_guesses_that_begin_alike_share_nodes() -> None:
    """And each row has a tree of its own."""
    rows = [[[1, 2, 3], [1, 4], [5]], [[1, 2, 3, 6], [7, 7]]]
    tree = merged(rows, PENDING, k_ary([2, 1, 1]))
    assert tree.tokens[:, 0].tolist() == [8, 9]
    assert [paths(tree.tokens[row].tolist(), tree.parents_of_rows()[row]) for row in range(2)] == [
        {(1,), (1, 2), (1, 2, 3), (1, 4), (5,), (0,)},  # one node was free
        {(1,), (1, 2), (1, 2, 3), (7,), (7, 7), (0,)},  # no deeper than is asked for
    ]
    assert tree.max_depth == 3


def test_the_best_guess_comes_first_and_the_others_have_what_is_left() -> None:
    tree = merged([[[1, 2, 3], [4, 5, 6]], []], PENDING, k_ary([2, 1]))
    assert tree.tokens.tolist() == [[8, 1, 2, 4, 5], [9, 0, 0, 0, 0]]
    assert tree.parents_of_rows()[0] == [-1, 0, 1, 0, 3]


def test_a_chain_is_the_first_guess() -> None:
    tree = merged([[[1, 2, 3], [4, 5, 6]], []], PENDING, chain(2))
    assert tree.is_chain
    assert tree.tokens.tolist() == [[8, 1, 2], [9, 0, 0]]


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """From pending, which is left out, to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return set(found[1:])
