"""Attention of steps that are trained together, in memory of the text and not of its square: a slot sees the true slots
of its document up to itself, and of the steps after them its own slot alone.

The true slots are the fused kernel's. A step beside them has one score a slot. Both are merged by their log-sum-exp, as
blocks are in ring attention (Liu et al. 2023, arXiv 2310.01889). In backward the kernel makes each probability anew
from a score and the log-sum-exp (FlashAttention-2, Dao 2023, arXiv 2307.08691): given the merged one, and the merged
output, it makes those of the whole.

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

from decode.forward.window import Window

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
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

    def asked(self, dtype: torch.dtype) -> dict[str, Any]:
        """What the kernel is asked for: of a row that sees nothing nothing is left once it is merged."""
        if self.visible is None:
            return {"is_causal": True}
        hidden = torch.zeros(self.visible.shape, dtype=dtype).masked_fill(~self.visible, torch.finfo(dtype).min)
        return {"is_causal": False, "attn_mask": hidden}


@dataclass(frozen=True)
class Reach:
    """What the slots of one step see."""

    parts: Sequence[Part]
    """Of the true slots."""
    own: Sequence[Tensor | None] = ()
    """Of each step after the true one: (B, T) bool where a slot sees its own of that step; None is everywhere."""

    @classmethod
    def of(cls, document: Tensor, positions: Tensor, window: Window | None, step: int) -> Reach:
        """In packed rows, document and positions (B, T); step s stands s places on."""
        parts = [part for run in _runs(document) for part in _parts(*run, positions, window, step)]
        own: list[Tensor | None] = [None] * step
        if window is not None:
            own = [window.keeps(positions + step, positions + one) for one in range(1, step + 1)]
        return cls(parts, own)


def merged(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], reach: Reach) -> Tensor:
    """query (B, H, T, d), keys and values (B, H_kv, T, d) of the true slots and of each step after them, on a CPU ->
    (B, T, H, d)."""
    others = [one for pair in zip(keys, values, strict=True) for one in pair]
    wide = query.dtype
    if torch.is_autocast_enabled("cpu"):  # as the kernel itself does where autograd records it
        wide = torch.get_autocast_dtype("cpu")
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
            out = mixed.to(query.dtype)
        ctx.reach = reach
        ctx.save_for_backward(query, out, whole, *others)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, out, whole, *others = ctx.saved_tensors
        reach, size, kv_heads = ctx.reach, query.shape[1], others[0].shape[1]
        gradient = upstream[0].contiguous()
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
    out = torch.empty_like(query)
    whole = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    for part in reach.parts:
        found = KERNEL(*part.of(query, key, value), 0.0, **part.asked(query.dtype))
        out[part.row, :, part.queries], whole[part.row, :, part.queries] = found[0][0], found[1][0]
    return out, whole


def _true_gradients(
    reach: Reach, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, whole: Tensor
) -> list[Tensor]:
    """Of query, key and value."""
    found = [torch.zeros_like(one) for one in (query, key, value)]
    for part in reach.parts:
        row = slice(part.row, part.row + 1)
        given = (one[row, :, part.queries].contiguous() for one in (out, whole))
        asked = part.asked(query.dtype)
        causal = asked.pop("is_causal")
        mine = [one.contiguous() for one in part.of(query, key, value)]
        ours = BACKWARD(gradient[row, :, part.queries].contiguous(), *mine, *given, 0.0, causal, **asked)
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


def _runs(document: Tensor) -> Iterator[tuple[int, int, int]]:
    """(row, begin, end) of each document, and of padding."""
    for row, names in enumerate(document.tolist()):
        begin = 0
        for _, run in groupby(names):
            end = begin + sum(1 for _ in run)
            yield row, begin, end
            begin = end


def _parts(row: int, begin: int, end: int, positions: Tensor, window: Window | None, step: int) -> Iterator[Part]:
    """Of a document: whole, or under a window block by block, of which each has its sinks and what is near."""
    if window is None:
        yield Part(row, slice(begin, end), slice(begin, end))
        return
    slots, places = torch.arange(begin, end), positions[row]
    first_near = begin + int((places[begin:end] < window.sinks).sum())
    for first in range(begin, end, BLOCK):
        last = min(first + BLOCK, end)
        near = min(max(first + step - window.size + 1, first_near), last - 1)
        keys = torch.cat([slots[: min(first_near, near) - begin], slots[near - begin : last - begin]])
        queries = slots[first - begin : last - begin]
        visible = window.sees(places[None, queries] + step, places[None, keys])[0] & (keys <= queries[:, None])
        yield Part(row, slice(first, last), keys, visible)
