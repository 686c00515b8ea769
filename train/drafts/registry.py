"""The trainable families by name: how each is shaped, built and exported."""

from __future__ import annotations

from decode.drafters.saved_head import HEADS
from train.drafts.family import Family
from train.drafts.head import head_build, head_export, head_shape
from train.drafts.lm import lm_build, lm_export, lm_shape

FAMILIES: dict[str, Family] = {
    "lm": Family(lm_shape, lm_build, lm_export),
    **dict.fromkeys(HEADS, Family(head_shape, head_build, head_export)),
}
