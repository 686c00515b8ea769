"""Logits processors that look at the prefix (penalties, bans): every node of a tree is given its own."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from decode.tree import Tree


def process_nodes(processors: LogitsProcessorList, rows: list[list[int]], tree: Tree, logits: Tensor) -> Tensor:
    """Processed logits (B, N, V): node n of row b sees the committed tokens of the row and the drafted ones on its
    path.

    Processors run on float32 or wider, as transformers runs them. `rows` end with pending, which is node 0.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    drafted, parents = tree.tokens.tolist(), tree.parents_of_rows()
    out = torch.empty_like(scores)
    for row, committed in enumerate(rows):
        for node in range(tree.num_nodes):
            prefix = committed + [drafted[row][step] for step in path_to(parents[row], node)]
            ids = torch.tensor([prefix], device=logits.device)
            out[row, node] = processors(ids, scores[row, node][None])[0]  # type: ignore[arg-type]
    return out


def path_to(parents: list[int], node: int) -> list[int]:
    """Node ids below pending down to `node`."""
    path = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
