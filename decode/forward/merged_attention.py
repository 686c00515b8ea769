"""Attention of steps that are trained together, in memory of the text and not of its square: a slot sees the true slots
of its document up to itself, and of the steps after them its own slot alone.

The true slots are the fused kernel's (`fused_kernels`). A step beside them has one score a slot. Both are merged by
their log-sum-exp, as blocks are in ring attention (Liu et al. 2023, arXiv 2310.01889). In backward the kernel makes
each probability anew from a score and the log-sum-exp (FlashAttention-2, Dao 2023, arXiv 2307.08691): given the merged
one, and the merged output, it makes those of the whole.

Measured on 2 cores (AVX2, float32), 9 heads of 64 over 3 groups, forward and backward, for the dense mask's: 7 steps
over a text of 2,048 tokens 1.8 s for 13.6, over ten texts in such a row 0.7 for 13.1; 3 steps over 4 rows of 512
tokens, of three texts each, 0.22 for 0.60.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from decode.forward.fused_kernels import computed_in, hiding, kernel_for
from decode.forward.window import Window

BLOCK = 256
"""Queries of a call under a window, whose keys are gathered and masked."""


@dataclass(frozen=True)
class Part:
    """Queries of a row that one call of the kernel compares with some keys of it."""

    row: int
    queries: slice
    keys: slice | Tensor
    visible: Tensor | None = None
    """(queries, keys) bool; None is causal, of the same slots."""

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Its own ones of three (B, H, T, d)."""
        row = slice(self.row, self.row + 1)
        return query[row, :, self.queries], key[row, :, self.keys], value[row, :, self.keys]

    def added(self, dtype: torch.dtype) -> Tensor | None:
        """To scores: of a row that sees nothing nothing is left once it is merged."""
        return None if self.visible is None else hiding(self.visible, dtype)


@dataclass(frozen=True)
class Run:
    """A document of a row, or its padding."""

    row: int
    begin: int
    end: int
    sinks: int
    """How many of its slots a window keeps for good."""


def runs_of(document: Tensor, positions: Tensor, window: Window | None) -> list[Run]:
    """Of packed rows, document and positions (B, T). On a GPU this waits for what is queued: once a batch is enough."""
    places = None if window is None else positions.cpu()
    found = []
    for row, names in enumerate(document.tolist()):
        begin = 0
        for _, run in groupby(names):
            end = begin + sum(1 for _ in run)
            sinks = 0 if places is None or window is None else int((places[row, begin:end] < window.sinks).sum())
            found.append(Run(row, begin, end, sinks))
            begin = end
    return found


@dataclass(frozen=True)
class Reach:
    """What the slots of one step see."""

    parts: Sequence[Part]
    """Of the true slots."""
    own: Sequence[Tensor | None] = ()
    """Of each step after the true one: (B, T) bool where a slot sees its own of that step; None is everywhere."""

    @classmethod
    def of(cls, runs: Sequence[Run], positions: Tensor, window: Window | None, step: int) -> Reach:
        """In packed rows, of positions (B, T); step s stands s places on."""
        parts = [part for run in runs for part in _parts(run, positions[run.row], window, step)]
        own: list[Tensor | None] = [None] * step
        if window is not None:
            own = [window.keeps(positions + step, positions + one) for one in range(1, step + 1)]
        return cls(parts, own)


def merged(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], reach: Reach) -> Tensor:
    """query (B, H, T, d), keys and values (B, H_kv, T, d) of the true slots and of each step after them -> (B, T, H,
    d)."""
    others = [one for pair in zip(keys, values, strict=True) for one in pair]
    wide = computed_in(query)
    return _Merged.apply(reach, query.to(wide), *(one.to(wide) for one in others)).transpose(1, 2)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reach: Reach, query: Tensor, *others: Tensor) -> Tensor:
        size = query.shape[1]
        keys, values = ([_of_heads(one, size) for one in others[at::2]] for at in (0, 1))
        out, whole = _true(reach, query, keys[0], values[0])
        if reach.own:
            scores = [_own_scores(query, key, seen) for key, seen in zip(keys[1:], reach.own, strict=True)]
            true, whole = whole, torch.stack([whole, *scores]).logsumexp(0)
            mixed = (true - whole).exp()[..., None] * out
            for score, value in zip(scores, values[1:], strict=True):
                mixed += (score - whole).exp()[..., None] * value
            out.copy_(mixed)
        ctx.reach = reach
        ctx.save_for_backward(query, out, whole, *others)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, out, whole, *others = ctx.saved_tensors
        reach, size, kv_heads = ctx.reach, query.shape[1], others[0].shape[1]
        gradient = upstream[0]
        keys, values = ([_of_heads(one, size) for one in others[at::2]] for at in (0, 1))
        of_query, *of_true = _true_gradients(reach, gradient, query, keys[0], values[0], out, whole)
        found, of_query = [*of_true], of_query.to(whole.dtype)
        shared = (gradient.to(whole.dtype) * out).sum(-1)
        for key, value, seen in zip(keys[1:], values[1:], reach.own, strict=True):
            chance = (_own_scores(query, key, seen) - whole).exp()
            slope = chance * ((gradient.to(whole.dtype) * value).sum(-1) - shared) * query.shape[-1] ** -0.5
            of_query += slope[..., None] * key
            found += [slope[..., None] * query, chance[..., None] * gradient]
        of_others = (one.unflatten(1, (kv_heads, -1)).sum(2).to(query.dtype) for one in found)
        return None, of_query.to(query.dtype), *of_others


def _true(reach: Reach, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, T, d) mixed from the true slots alone, and (B, H, T) the log-sum-exp of their scores."""
    batch, heads, length, size = query.shape
    out = query.new_empty(batch, length, heads, size).transpose(1, 2)  # kernels of GPUs want it back in this order
    whole = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    for part in reach.parts:
        kernel = kernel_for(query, part.visible is not None)
        found = kernel.forward(*part.of(query, key, value), part.added(query.dtype))
        out[part.row, :, part.queries], whole[part.row, :, part.queries] = found[0][0], found[1][0]
    return out, whole


def _true_gradients(
    reach: Reach, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, whole: Tensor
) -> list[Tensor]:
    """Of query, key and value."""
    found = [torch.zeros_like(one) for one in (query, key, value)]
    for part in reach.parts:
        mixed, *given = (one[part.row : part.row + 1, :, part.queries] for one in (gradient, out, whole))
        kernel = kernel_for(query, part.visible is not None)
        ours = kernel.backward(mixed, *part.of(query, key, value), part.added(query.dtype), *given)
        found[0][part.row, :, part.queries] = ours[0][0]
        for total, own in zip(found[1:], ours[1:], strict=True):  # a key is seen from several parts
            total[part.row][:, part.keys] += own[0]
    return found


def _own_scores(query: Tensor, key: Tensor, seen: Tensor | None) -> Tensor:  # -> (B, H, T)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(wide) * key).sum(-1) * query.shape[-1] ** -0.5
    return scores if seen is None else scores.masked_fill(~seen[:, None], -torch.inf)


def _of_heads(one: Tensor, heads: int) -> Tensor:
    """(B, H_kv, T, d) -> (B, H, T, d)."""
    return one if one.shape[1] == heads else one.repeat_interleave(heads // one.shape[1], 1)


def _parts(run: Run, places: Tensor, window: Window | None, step: int) -> Iterator[Part]:
    """Of a document, its row's positions (T,): whole, or under a window block by block, of which each has its sinks and
    what is near."""
    if window is None:
        yield Part(run.row, slice(run.begin, run.end), slice(run.begin, run.end))
        return
    slots, first_near = torch.arange(len(places), device=places.device), run.begin + run.sinks
    for first in range(run.begin, run.end, BLOCK):
        last = min(first + BLOCK, run.end)
        near = min(max(first + step - window.size + 1, first_near), last - 1)
        keys = torch.cat([slots[run.begin : min(first_near, near)], slots[near:last]])
        queries = slots[first:last]
        visible = window.sees(places[None, queries] + step, places[None, keys])[0] & (keys <= queries[:, None])
        yield Part(run.row, slice(first, last), keys, visible)
