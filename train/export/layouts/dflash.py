"""DFlash as its authors publish it, without embedding and output head, which engines take from the target.

A block holds the token before it in slot 0 and masks behind it; slot k drafts the k-th token, slot 0 none. So a block
of `block_size` 4 drafts 3 tokens.

What fills a slot is the embedding of a token, or a learned vector that replaces it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from decode.common.errors import InputError
from decode.formats.blocks import MASK_FILE
from decode.models.compatibility import load_tokenizer
from train.export.layouts import blocks
from train.export.layouts.base import Layout
from train.export.source import Source

HOW = "train with draft.head.mask_token=ID, the id of a token that no text holds"


def unused_row(source: Source) -> int | None:
    """The first row of the target's embedding behind all tokens of its tokenizer; None where there is none."""
    try:
        tokens = load_tokenizer(source.target.source).get_vocab()
    except InputError:
        return None
    first = max(tokens.values(), default=-1) + 1  # ids may have gaps, so that the number of tokens is one of them
    return first if first < source.target.vocab_size else None


def mask_token_id(source: Source) -> int | None:
    """The mask's id: the one it was trained with; for a learned mask an unused row, else a token that begins or fills
    up texts, and that a target is never answered with, so that no block begins with it. None where there is none."""
    given = blocks.shape(source).mask_token
    if given is not None:
        return given
    text = source.target.config.get_text_config()
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    candidates = (unused_row(source), text.bos_token_id, text.pad_token_id)
    return next((one for one in candidates if one is not None and one not in ends), None)


def no_id(source: Source) -> str | None:
    """Why no id can stand for the mask; None where one can."""
    if mask_token_id(source) is not None:
        return None
    return f"its mask is a learned vector, which needs the id of a token that {source.target.path} never writes; {HOW}"


def no_learned(source: Source, engine: str) -> str | None:
    """Why an engine that embeds masks by the target alone does not take this one."""
    if blocks.shape(source).mask_token is not None:
        return None
    return f"its mask is a learned vector, and {engine} has the target's embedding alone; {HOW}"


def write_mask(source: Source, folder: Path) -> None:
    """The learned mask as vLLM and SGLang read it, with `torch.load(weights_only=True)`; nothing where the mask is one
    of the target's rows."""
    if blocks.shape(source).mask_token is None:
        row = source.weights["mask.weight"][0].clone()
        torch.save({"embedding": row, "mask_token_id": mask_token_id(source)}, folder / MASK_FILE)


def config(source: Source) -> dict[str, Any]:
    """With what engines guess where it is missing: that blocks see themselves whole, and that slot 0 drafts nothing."""
    fields = blocks.fields(source, "dflash", mask_token_id(source), blocks.shape(source).depth + 1)
    return {"architectures": ["DFlashDraftModel"]} | fields


DFLASH = Layout("dflash", config, blocks.tensors, blocks.manifest, extras=write_mask)
