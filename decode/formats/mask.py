"""What fills the slots of a block that are to be drafted: a row of the embedding, `mask_token_id`, which is the
target's or one behind it (V + 1 rows, DSpark of ours); or a learned vector in `mask_embedding.pt` (vLLM 0.32,
qwen3_dflash.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decode.common.errors import InputError
from decode.formats.base import EMBEDDING, Get
from decode.formats.folder import PublishedFolder
from decode.formats.weights import read_pickle
from decode.models.describe import ModelDescription
from decode.models.mask_token import usual_mask

if TYPE_CHECKING:
    from decode.formats.source import Source

MASK_FILE = "mask_embedding.pt"
MASK_ID = "mask_token_id"
HOW = "train with draft.head.mask_token=ID, the id of a token that no text holds"


def mask_row(folder: PublishedFolder, target: ModelDescription) -> int | None:
    """A token of the target, whose row of the embedding is the mask; None where it is a vector."""
    if (folder.path / MASK_FILE).is_file():
        return None
    token, name = folder.setting(MASK_ID), folder.plain_names.get(EMBEDDING)
    if token is None:
        raise InputError(
            f"{folder.path}/config.json says no {MASK_ID}, and there is no {MASK_FILE}: nobody knows what stands "
            "in a block for the tokens to be drafted. Write the id that it was trained with"
        )
    if token == target.vocab_size < (0 if name is None else folder.stored[name].shape[0]):
        return None
    if not 0 <= token < target.vocab_size:
        raise InputError(
            f"{folder.path}/config.json says {MASK_ID}={token}, and the target has tokens 0 to "
            f"{target.vocab_size - 1}; the folder has no row for it either. Write the id that it was trained with, or "
            "fetch the folder again"
        )
    return token


def mask_vector(folder: PublishedFolder, get: Get) -> Tensor:
    """(1, d) the vector of the file, else the last row of the embedding."""
    file = folder.path / MASK_FILE
    if not file.is_file():
        return get(folder.named(EMBEDDING))[-1:]
    held = read_pickle(file)
    vector = held.get("embedding") if isinstance(held, dict) else held
    if not isinstance(vector, Tensor) or not vector.is_floating_point():
        raise InputError(f"{file} holds no vector, and blocks are filled with it. Fetch it again")
    return vector.reshape(1, -1)


def write_mask(source: Source, folder: Path) -> None:
    """The learned mask as vLLM and SGLang read it, with `torch.load(weights_only=True)`; nothing where the mask is one
    of the target's rows."""
    if source.block.mask_token is None:
        row = source.weights["mask.weight"][0].clone()
        torch.save({"embedding": row, MASK_ID: mask_id(source)}, folder / MASK_FILE)


def mask_id(source: Source) -> int | None:
    """The mask's id: the one it was trained with, or for a learned mask the usual one."""
    given = source.block.mask_token
    return usual_mask(source.target) if given is None else given
