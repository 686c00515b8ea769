"""Logits processors that look at the prefix (penalties, bans): every node of a tree is given its own.

Processors take (rows, length) token ids without padding, so nodes are put before them in groups of one length: all
nodes of one depth, of all rows that are equally long.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    ClassifierFreeGuidanceLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from decode.common.typed_config import require
from decode.sampling.allowed_tokens import AllowedTokens
from decode.trees.tree import Tree

BOUND_TO_CALLS = (
    ClassifierFreeGuidanceLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
"""Of transformers: they carry something on from call to call, or hold a row for each row of the batch."""


@dataclass(frozen=True)
class History:
    """The processors of a call and the committed tokens that they look at."""

    processors: LogitsProcessorList
    """Called with ids (n, length), scores (n, V) and, where they name them, prompt_lengths (n,) and requests (n,)
    int64."""
    ids: Tensor
    """(B, capacity) int64 committed tokens, left-aligned, pending included."""
    lengths: list[int]
    """Committed tokens of each row."""
    prompt_lengths: list[int]
    """How many of them are the prompt's."""
    requests: list[int]
    """The request that each row holds, by its place among all sequences of the call."""

    def of_tree(self, tree: Tree, logits: Tensor) -> Tensor:
        """Processed logits (B, N, V): a node sees the row's committed tokens and the drafted ones on its path.

        In float32 or wider, as transformers runs processors. A host sync where rows have trees of their own.
        """
        same = not isinstance(tree.parents, Tensor)
        every = list(range(len(self.lengths)))
        shapes = [(every, tree.parents)] if same else [([row], x) for row, x in enumerate(tree.parents_of_rows())]
        out = widened(logits)
        for rows, parents in shapes:
            for nodes, paths in _by_length(parents, tree.num_nodes):  # type: ignore[arg-type]
                at = torch.tensor(rows, device=logits.device)[:, None]
                on = torch.tensor(nodes, device=logits.device)
                index = torch.tensor(paths, device=logits.device, dtype=torch.long)
                out[at, on] = self.of_nodes(out[at, on], tree.tokens[at[..., None], index], rows)
        return out

    def of_nodes(self, logits: Tensor, paths: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Processed logits (R, W, V) of W nodes of one depth D in each of the rows (all of them by default): paths
        (R, W, D) are the drafted tokens from the first one to the node itself."""
        rows = rows if rows is not None else range(len(self.lengths))
        out = widened(logits)
        width, depth = paths.shape[1:]
        groups: dict[int, list[int]] = {}
        for slot, row in enumerate(rows):
            groups.setdefault(self.lengths[row], []).append(slot)
        for length, slots in groups.items():
            chosen = [rows[slot] for slot in slots]
            committed = self.ids[chosen, :length][:, None].expand(-1, width, -1)
            prefixes = torch.cat([committed, paths[slots]], -1).view(-1, length + depth)
            told = {"prompt_lengths": self.prompt_lengths, "requests": self.requests}
            of_rows = {name: [values[row] for row in chosen for _ in range(width)] for name, values in told.items()}
            tensors = {name: torch.tensor(values, device=logits.device) for name, values in of_rows.items()}
            scores = out[slots].flatten(0, 1)
            done = processed(self.processors, prefixes, scores, **tensors)
            out[slots] = done.to(out.dtype).view(len(slots), width, -1)
        return out


def check_processors(processors: Sequence[Any]) -> list[Any]:
    """The processors, those that transformers makes of a prefix_allowed_tokens_fn as ours; raises ConfigError for what
    is none, and for those of transformers that are no functions of the prefix."""
    for one in processors:
        require(callable(one), f"logits_processor holds {one!r}, which cannot be called; give transformers' processors")
        require(
            not isinstance(one, BOUND_TO_CALLS),
            f"logits processor {name_of(one)} goes by the row of the batch, or by what it was asked before. Use one "
            "that looks at the tokens of a row alone, or transformers' own generate",
        )
    return [
        AllowedTokens(one._prefix_allowed_tokens_fn) if isinstance(one, PrefixConstrainedLogitsProcessor) else one
        for one in processors
    ]


def processed(
    processors: Iterable[Any], prefixes: Tensor, scores: Tensor, prompt_lengths: Tensor, requests: Tensor
) -> Tensor:
    """scores (n, V) of prefixes (n, length) after all processors; raises ConfigError where one returns something that
    is not scores of these rows."""
    told: dict[str, Any] = {"prompt_lengths": prompt_lengths, "requests": requests}
    for one in processors:
        named = inspect.signature(one.__call__).parameters  # transformers hands all of it to those that name any
        wanted = {name: value for name, value in told.items() if name in named}
        done = LogitsProcessorList([one])(prefixes, scores, **wanted)  # type: ignore[arg-type]
        _check_answer(one, done, scores)
        scores = done
    return scores


def name_of(processor: Any) -> str:
    """For messages: its class, or the function that it is."""
    return getattr(processor, "__name__", type(processor).__name__)


def _check_answer(processor: Any, done: Any, scores: Tensor) -> None:
    want = (tuple(scores.shape), scores.dtype, scores.device)
    have = (tuple(done.shape), done.dtype, done.device) if isinstance(done, Tensor) else type(done).__name__
    require(
        isinstance(done, Tensor)
        and done.shape == scores.shape
        and done.is_floating_point()
        and done.device == scores.device,
        f"logits processor {name_of(processor)} was given scores {want} and returned {have}; it must return scores of "
        "the same shape, of floating point, on the same device",
    )


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Node ids below pending down to `node`."""
    path = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def widened(logits: Tensor) -> Tensor:
    """A copy in float32, or float64 where it is that: processors may write to what they are given."""
    return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)


def _by_length(parents: Sequence[int], num_nodes: int) -> list[tuple[list[int], list[list[int]]]]:
    """Nodes with paths of one length, and these paths."""
    groups: dict[int, tuple[list[int], list[list[int]]]] = {}
    for node in range(num_nodes):
        path = path_to(parents, node)
        nodes, paths = groups.setdefault(len(path), ([], []))
        nodes.append(node)
        paths.append(path)
    return list(groups.values())
