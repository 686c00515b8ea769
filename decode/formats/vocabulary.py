"""The target's tokens that a published head drafts: by `d2t` (what to add to a draft id) or `token_map` (the ids)."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.common.errors import InputError
from decode.formats.folder import PublishedFolder

OFFSETS, IDS = "d2t", "token_map"


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
            f"{wrong}: drafted tokens would stand for other ones. Serve the target that the head was trained on, or "
            f"fetch the folder again ({OFFSETS} holds what is to be added to a draft id, {IDS} the ids)"
        )
    return ids


def picked(rows: Tensor, index: Tensor) -> Tensor:
    """rows (R, ...) at index (N,); of a tensor without values, the shape alone."""
    return rows.new_empty((len(index), *rows.shape[1:])) if rows.is_meta else rows[index]
