"""The dynamic program against every tree there is."""

from __future__ import annotations

import pytest

from decode.trees.sequoia import Planner, expected_tokens
from decode.trees.tree import tree_depths
from decode.trees.tree_plans import chain, comb, k_ary

PROFILES = [
    [[0.6, 0.2, 0.1]],
    [[0.95, 0.02]],
    [[0.3, 0.25, 0.2, 0.15]],
    [[0.4, 0.05, 0.3]],  # candidates need not come in order of their worth
    [[0.5, 0.0, 0.4]],
    [[0.8]],
    [[0.0, 0.0]],
    [[0.6, 0.2, 0.1], [0.4, 0.2], [0.2, 0.15, 0.1]],  # heads that get worse
    [[0.3, 0.3], [0.9, 0.05]],  # and better: a second candidate is worth the chain behind it
    [[0.5, 0.1], [0.0, 0.6], [0.7]],
    [[0.6, 0.2], [0.5, 0.2], [0.0]],  # two heads
]


def every_tree(num_nodes: int) -> list[tuple[int, ...]]:
    """Parent arrays of every ordered tree: each node's parent lies on the rightmost path, so each comes up once."""
    trees = [(-1,)]
    for _ in range(num_nodes - 1):
        grown = []
        for tree in trees:
            above = len(tree) - 1
            while above >= 0:
                grown.append((*tree, above))
                above = tree[above]
        trees = grown
    return trees


def test_the_enumeration_is_complete() -> None:
    """Ordered trees of n nodes are counted by the Catalan numbers."""
    assert [len(set(every_tree(n))) for n in range(1, 8)] == [1, 1, 2, 5, 14, 42, 132]


@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_no_tree_of_up_to_seven_nodes_emits_more(profile: list[list[float]]) -> None:
    planner = Planner(profile)
    for num_nodes in range(1, 8):
        for depth in range(7):
            rivals = [
                tree for n in range(1, num_nodes + 1) for tree in every_tree(n) if max(tree_depths(tree)) <= depth
            ]
            best = max(expected_tokens(tree, profile) for tree in rivals)
            found = planner.tree(num_nodes - 1, depth)
            assert found.depth <= depth
            assert found.num_nodes <= num_nodes
            assert expected_tokens(found.parents, profile) == pytest.approx(best, abs=1e-12)


def test_expected_tokens_add_up_over_nodes() -> None:
    a, b = 0.6, 0.2
    assert expected_tokens(chain(3).parents, [[a, b]]) == pytest.approx(1 + a + a**2 + a**3)
    assert expected_tokens(k_ary([2, 1]).parents, [[a, b]]) == pytest.approx(1 + a + b + a * a + b * a)
    assert expected_tokens(k_ary([3]).parents, [[a, b]]) == pytest.approx(1 + a + b)  # nothing is known of a third


def test_a_node_is_worth_the_product_of_its_paths_chances_depth_by_depth() -> None:
    profile = [[0.6, 0.2], [0.5, 0.1], [0.3]]
    assert expected_tokens(chain(4).parents, profile) == pytest.approx(1 + 0.6 * (1 + 0.5 * (1 + 0.3 * (1 + 0.3))))
    assert expected_tokens(k_ary([2, 2]).parents, profile) == pytest.approx(1 + (0.6 + 0.2) * (1 + 0.5 + 0.1))
    assert expected_tokens(comb([2, 2, 1]).parents, profile) == pytest.approx(1 + 0.8 + 0.6 * (0.6 + 0.5 * 0.3))


def test_a_comb_has_the_candidates_of_every_depth_under_the_best_of_the_one_before() -> None:
    assert comb([3, 2, 1]).parents == (-1, 0, 0, 0, 1, 1, 4)
    assert comb([4]) == k_ary([4])
    assert comb([1, 1]) == chain(2)


def test_no_level_is_planned_that_no_head_drafts() -> None:
    assert Planner([[0.6], [0.5], [0.0]]).tree(9, 9) == chain(2)


def test_one_candidate_makes_a_chain_and_a_useless_draft_nothing() -> None:
    assert Planner([[0.8]]).tree(4, 9) == chain(4)
    assert Planner([[0.0, 0.0]]).tree(4, 9) == chain(0)
    assert Planner([[0.3, 0.3, 0.3]]).tree(3, 9) == k_ary([3])


def test_of_falling_profiles_the_nodes_of_highest_product_are_kept() -> None:
    """Where each candidate is worth no more than the one before, the best nodes hold their parents and elder siblings:
    another way to the same optimum, for trees too large to enumerate."""
    rows, num_draft_nodes = [[0.6, 0.15, 0.08, 0.05, 0.03, 0.02], [0.5, 0.2, 0.1], [0.3, 0.1]], 63
    for profile in (rows[:1], rows):
        found, frontier = 1.0, [(a, 1) for a in profile[0]]
        for _ in range(num_draft_nodes):
            best, depth = max(frontier)
            frontier.remove((best, depth))
            frontier += [(best * a, depth + 1) for a in profile[min(depth, len(profile) - 1)]]
            found += best
        tree = Planner(profile).tree(num_draft_nodes, num_draft_nodes)
        assert expected_tokens(tree.parents, profile) == pytest.approx(found)
        assert Planner(profile).tree(num_draft_nodes, 4).depth == 4
