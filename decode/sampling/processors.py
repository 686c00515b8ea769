"""Logits processors that look at the prefix (penalties, bans): every node of a tree is given its own.

Processors take (rows, length) token ids without padding, so nodes are put before them in groups of one length: all
nodes of one depth, of all rows that are equally long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    ClassifierFreeGuidanceLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from decode.common.typed_config import require
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
    """Called with ids (n, length), scores (n, V) and, where they name it, prompt_lengths (n,) int64."""
    ids: Tensor
    """(B, capacity) int64 committed tokens, left-aligned, pending included."""
    lengths: list[int]
    """Committed tokens of each row."""
    prompt_lengths: list[int]
    """How many of them are the prompt's."""

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
            prompts = torch.tensor([self.prompt_lengths[row] for row in chosen], device=logits.device)
            prompts = prompts.repeat_interleave(width)
            scores = out[slots].flatten(0, 1)
            done = processed(self.processors, prefixes, scores, prompts)
            out[slots] = done.to(out.dtype).view(len(slots), width, -1)
        return out


def check_processors(processors: Any, num_requests: int) -> list[Any]:
    """The processors as a list; raises ConfigError for what is none, and for those of transformers that are no
    functions of the prefix."""
    found = [] if processors is None else list(processors) if isinstance(processors, Iterable) else [processors]
    for one in found:
        require(callable(one), f"logits_processor holds {one!r}, which cannot be called; give transformers' processors")
        bound = isinstance(one, BOUND_TO_CALLS)
        bound = bound or (isinstance(one, PrefixConstrainedLogitsProcessor) and num_requests > 1)
        require(
            not bound,
            f"logits processor {name_of(one)} goes by the row of the batch, or by what it was asked before, and here "
            f"its rows are drafted tokens of {num_requests} request(s), some of them asked about twice. Use one that "
            "looks at the tokens of a row alone, or transformers' own generate",
        )
    return found


def processed(processors: Iterable[Any], prefixes: Tensor, scores: Tensor, prompt_lengths: Tensor) -> Tensor:
    """scores (n, V) of prefixes (n, length) after all processors; raises ConfigError where one returns something that
    is not scores of these rows."""
    for one in processors:
        done = LogitsProcessorList([one])(prefixes, scores, prompt_lengths=prompt_lengths)  # type: ignore[arg-type]
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


RTOL, ATOL = 1e-3, 1e-4  # of answers that differ by rounding alone: a processor may hold a network


class Audited(LogitsProcessor):
    """A processor that is asked three times instead of once: for the rows, for the same rows in the opposite order, and
    for the first prefix of all, whose answer is kept. Raises ConfigError where the answers differ.

    Speculative decoding takes processors for functions of the tokens and the scores: drafted tokens are put before
    them as well, some of them again in the next round and all nodes of a depth as rows of one call. One that counts its
    calls, or knows its rows by their place, would make the text depend on the draft.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self._first: tuple[Tensor, Tensor, Tensor] | None = None
        self._answer: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, prompt_lengths: Tensor) -> Tensor:  # type: ignore[override]
        """ids (n, length), scores (n, V), prompt_lengths (n,) -> (n, V)."""
        done = self._ask(input_ids, scores, prompt_lengths)
        self._require_same(done, self._ask(*(one.flip(0) for one in (input_ids, scores, prompt_lengths))).flip(0))
        if self._first is None:
            self._first = input_ids[:1].clone(), scores[:1].clone(), prompt_lengths[:1].clone()
            self._answer = done[:1].clone()
        assert self._answer is not None
        self._require_same(self._answer, self._ask(*self._first))
        self._require_a_choice(done)
        return done

    def _ask(self, input_ids: Tensor, scores: Tensor, prompt_lengths: Tensor) -> Tensor:
        shown = input_ids.clone()
        done = processed([self.processor], shown, scores.clone(), prompt_lengths)
        require(
            torch.equal(shown, input_ids),
            f"logits processor {name_of(self.processor)} writes to the input_ids that it is shown, which the "
            "processors after it are shown too. Let it work on a copy",
        )
        return done

    def _require_same(self, one: Tensor, other: Tensor) -> None:
        require(
            torch.allclose(one, other, rtol=RTOL, atol=ATOL, equal_nan=True),
            f"logits processor {name_of(self.processor)} was asked about the same tokens and scores again and answered "
            "otherwise: it counts its calls, draws at random, or knows rows by their place. It is asked about drafted "
            "tokens too, so the text would depend on the draft. Make it a function of each row of input_ids and scores "
            "(input_ids.shape[1] tells how far the text is), or decode with transformers",
        )

    def _require_a_choice(self, done: Tensor) -> None:
        broken = done.isnan().any() | (done == torch.inf).any() | (done == -torch.inf).all(-1).any()
        require(
            not bool(broken),
            f"logits processor {name_of(self.processor)} leaves scores that are nan or inf, or no token at all: there "
            "is nothing to choose by, and any token would come out. Let it leave some token a finite score",
        )
