"""The target's tokens that a published head drafts: by `d2t` (what to add to a draft id), beside which `t2d` marks
them, or by `token_map` (the ids)."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.common.errors import InputError
from decode.formats.base import Spec
from decode.formats.folder import PublishedFolder

OFFSETS, MARKS, IDS = "d2t", "t2d", "token_map"


def drafted_ids(folder: PublishedFolder) -> Tensor | None:
    """The target's ids of a reduced draft vocabulary, as they are written; None where there is no such tensor."""
    stored = folder.stored
    if IDS in stored and len(stored[IDS].shape) == 1:
        return folder.tensor(IDS).long()
    if OFFSETS in stored and len(stored[OFFSETS].shape) == 1:
        offsets = folder.tensor(OFFSETS).long()
        return offsets + torch.arange(len(offsets))
    return None


def vocabulary_of(folder: PublishedFolder, vocab_size: int) -> Tensor | None:
    """(V_draft,) the ids in the order of the output head's rows; None where every token is drafted. InputError where
    they are not different tokens of the target."""
    ids = drafted_ids(folder)
    if ids is None or torch.equal(ids, torch.arange(vocab_size)):
        return None
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside) or len(ids.unique()) < len(ids):
        name = IDS if IDS in folder.stored else OFFSETS
        wrong = f"{int(outside[0])} is none" if len(outside) else "some of them are there twice"
        raise InputError(
            f"{name} of {folder.path} should give {len(ids)} different tokens of the target's {vocab_size}, and "
            f"{wrong}. Serve the target that the head was trained on, or fetch the folder again"
        )
    return ids


def picked(rows: Tensor, index: Tensor) -> Tensor:
    """rows (R, ...) at index (N,); of a tensor without values, the shape alone."""
    return rows.new_empty((len(index), *rows.shape[1:])) if rows.is_meta else rows[index]


def token_maps(ids: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """d2t (V_draft,) and t2d (V,) of a reduced vocabulary; nothing where all tokens are drafted."""
    if ids is None or len(ids) == vocab_size:
        return {}
    drafted = torch.zeros(vocab_size, dtype=torch.bool)
    drafted[ids] = True
    return {OFFSETS: ids - torch.arange(len(ids)), MARKS: drafted}


def map_specs(drafted: int, vocab_size: int) -> dict[str, Spec]:
    """Room that engines make for them."""
    return {OFFSETS: Spec((drafted,), "int64"), MARKS: Spec((vocab_size,), "bool", optional=True)}
