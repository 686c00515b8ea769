"""The rotary embedding that a draft takes over from its target."""

from __future__ import annotations

from typing import Any

from decode.models.load import ModelDescription

PLAIN_ROPES = ("default", "linear", "dynamic", "llama3", "yarn")  # the others hold factors that fit one head size only


def rope_of(target: ModelDescription | None, same_head_dim: bool = False) -> dict[str, Any]:
    """The target's rotary embedding where it fits any head size (or the draft's is the target's), else its base
    frequency alone; transformers' `rope_parameters`."""
    rope = dict(getattr(target.config.get_text_config(), "rope_parameters", None) or {}) if target else {}
    if isinstance(rope.get("full_attention"), dict):  # one set per kind of layer
        rope = dict(rope["full_attention"])
    is_whole = rope.pop("partial_rotary_factor", 1.0) == 1.0
    if (same_head_dim and is_whole) or rope.get("rope_type", "default") in PLAIN_ROPES:
        return {"rope_type": "default", "rope_theta": 10000.0} | rope
    return {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
