"""DFlash as its authors publish it, without embedding and output head, which engines take from the target.

A block holds the token before it in slot 0 and masks behind it; slot k drafts the k-th token, slot 0 none. So a block
of `block_size` 4 drafts 3 tokens.
"""

from __future__ import annotations

from typing import Any

from train.export.layouts import blocks
from train.export.layouts.base import Layout
from train.export.layouts.mask import mask_token_id, write_mask
from train.export.source import Source


def config(source: Source) -> dict[str, Any]:
    """With what engines guess where it is missing: that blocks see themselves whole, and that slot 0 drafts nothing."""
    fields = blocks.fields(source, "dflash", mask_token_id(source), blocks.shape(source).depth + 1)
    return {"architectures": ["DFlashDraftModel"]} | fields


DFLASH = Layout("dflash", config, blocks.tensors, blocks.manifest, extras=write_mask)
