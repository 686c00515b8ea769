"""Many continuations of one text, and the tree of those that are the most frequent."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence


def likeliest(continuations: Sequence[Sequence[int]], num_nodes: int) -> list[list[int]]:
    """Paths through the `num_nodes` prefixes that most of `continuations` begin with, the most frequent first. A prefix
    is never chosen before the one that it extends."""
    counts = Counter(tuple(one[:end]) for one in continuations for end in range(1, len(one) + 1))
    ranked = heapq.nsmallest(num_nodes, counts, key=lambda path: (-counts[path], len(path)))
    inner = {path[:-1] for path in ranked}
    return [list(path) for path in ranked if path not in inner]


def likeliest_chain(continuations: Sequence[Sequence[int]]) -> list[int]:
    """Step by step what most of the continuations that agree so far go on with."""
    chain, left = list[int](), list(continuations)
    while left := [one for one in left if len(one) > len(chain)]:
        chain.append(Counter(one[len(chain)] for one in left).most_common(1)[0][0])
        left = [one for one in left if one[len(chain) - 1] == chain[-1]]
    return chain
