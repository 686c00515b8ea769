"""The rotary embedding that a draft takes over from its target."""

from __future__ import annotations

from typing import Any

from decode.formats.rope import FACTOR_BY_LENGTH
from decode.models.describe import ModelDescription

PLAIN_ROPES = ("default", "linear", "dynamic", "llama3", "yarn")  # the others hold factors that fit one head size only


def rope_of(target: ModelDescription | None, same_head_dim: bool = False) -> dict[str, Any]:
    """The target's rotary embedding where it fits any head size (or the draft's is the target's), else its base
    frequency alone; transformers' `rope_parameters`. Heads are turned whole, also where the target turns a part."""
    text = target.config.get_text_config() if target else None
    rope = dict(getattr(text, "rope_parameters", None) or {})
    if isinstance(rope.get("full_attention"), dict):  # one set per kind of layer
        rope = dict(rope["full_attention"])
    kind, original = rope.get("rope_type", "default"), rope.get("original_max_position_embeddings")
    is_whole = kind == "proportional" or rope.get("partial_rotary_factor", 1.0) == 1.0
    if kind != "proportional":  # which leaves the size as it is
        rope.pop("partial_rotary_factor", None)
    if text is not None and kind in FACTOR_BY_LENGTH and original and rope.get("factor") is None:
        # else it would follow from the draft's own length
        rope["factor"] = text.max_position_embeddings / original
    if (same_head_dim and is_whole) or kind in PLAIN_ROPES:
        return {"rope_type": "default", "rope_theta": 10000.0} | rope
    return {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
