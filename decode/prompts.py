"""The prompts that `input_ids` and `attention_mask` hold, as people give them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decode.common.progress import get_logger
from decode.common.typed_config import require

log = get_logger("decode")

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_ids(input_ids: Any, vocab_size: int) -> None:
    """Raise ConfigError unless `input_ids` is a tensor (B, T) of tokens that the model knows."""
    kind = type(input_ids).__name__
    require(
        isinstance(input_ids, Tensor),
        f"input_ids is of type {kind}; give a tensor (requests, tokens), and of a tokenizer's answer its input_ids and "
        "its attention_mask",
    )
    shape = tuple(input_ids.shape)
    require(len(shape) == 2 and shape[0] > 0, f"input_ids has shape {shape}; give (requests, tokens), at least one row")
    require(input_ids.dtype in INTEGERS, f"input_ids is {input_ids.dtype}; token ids are integers")
    if not shape[1]:
        return  # a prompt without tokens has a message of its own
    least, most = int(input_ids.min()), int(input_ids.max())
    require(
        least >= 0 and most < vocab_size,
        f"input_ids holds ids from {least} to {most}, and the model knows 0 to {vocab_size - 1}; encode the prompt "
        "with the model's own tokenizer",
    )


def prompts_of(
    input_ids: Tensor, attention_mask: Tensor | None, pad_id: int | None, ends: list[int]
) -> list[list[int]]:
    """The tokens of each row: those where attention_mask (B, T) is 1, wherever the others stand.

    Without a mask it is inferred as transformers does: pad tokens are left out, unless they are end tokens as well, for
    then nobody can tell padding from text. Raises ConfigError for a mask of another shape or with other values.
    """
    rows = input_ids.tolist()
    if attention_mask is not None:
        kept = _checked(attention_mask, tuple(input_ids.shape)).tolist()
        return [[token for token, keep in zip(*row, strict=True) if keep] for row in zip(rows, kept, strict=True)]
    if pad_id is None or pad_id in ends:
        _warn_of_padding(rows, pad_id)
        return rows
    return [[token for token in row if token != pad_id] for row in rows]


def _checked(mask: Any, shape: tuple[int, ...]) -> Tensor:
    kind = type(mask).__name__
    require(isinstance(mask, Tensor), f"attention_mask is of type {kind}; give a tensor of 0 and 1, of shape {shape}")
    require(
        tuple(mask.shape) == shape,
        f"attention_mask has shape {tuple(mask.shape)}, input_ids {shape}; they must be equal",
    )
    other = mask[(mask != 0) & (mask != 1)]
    require(
        not other.numel(),
        f"attention_mask holds {other[:1].tolist()}; it says 1 where a token counts and 0 where it is padding. A mask "
        "that is added to scores means the opposite: give mask == 0 in its place",
    )
    return mask


def _warn_of_padding(rows: list[list[int]], pad_id: int | None) -> None:
    if len(rows) > 1 and any(row and pad_id in (row[0], row[-1]) for row in rows):
        log.warning(
            "rows begin or end with token %s, which is the pad token and an end token as well, and no attention_mask "
            "says which: it is read as text. Give the tokenizer's attention_mask",
            pad_id,
        )
