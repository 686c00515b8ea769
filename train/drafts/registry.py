"""The trainable families by name."""

from __future__ import annotations

from decode.drafters.saved_head import HEADS
from train.drafts.blueprint import Family
from train.drafts.head_blueprint import head_blueprint
from train.drafts.lm_blueprint import lm_blueprint

FAMILIES: dict[str, Family] = {"lm": lm_blueprint, **dict.fromkeys(HEADS, head_blueprint)}
