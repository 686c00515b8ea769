"""Rotary positions as config.json says them: `rope_parameters`, or as older ones `rope_theta` with `rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT_BASE = 10000.0
"""What engines and transformers take where nothing is said."""
FACTOR_BY_LENGTH = ("yarn", "longrope")
"""Kinds whose factor, where it is left out, is max_position_embeddings by the original length."""
HAD_LOCAL_BASE = ("gemma3_text", "gemma3n_text", "olmo3")
"""Types whose windowed layers turn by a plain base of their own, and said so before `rope_parameters`."""


def written_rope(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """What engines of today read; None where there is nothing."""
    new = fields.get("rope_parameters")
    return plain_rope(new) if new else older_rope_of(fields)


def older_rope_of(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """What readers of transformers 4 know."""
    if fields.get("rope_theta") is None:
        return None
    beside = {name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    return plain_rope({**beside, **(fields.get("rope_scaling") or {})})


def plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """With the kind under one name, and without what is null."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    rest = {key: value for key, value in rope.items() if key not in ("rope_type", "type") and value is not None}
    return {"rope_type": kind, **dict(sorted(rest.items()))}


def older_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding as readers know it that do not know `rope_parameters`; nothing where kinds of layers differ
    in it and had no names for that before."""
    rope, kind = fields.get("rope_parameters") or {}, str(fields.get("model_type"))
    local = rope.get("sliding_attention") or {}
    if kind in HAD_LOCAL_BASE and local.get("rope_type") == "default":
        full = older_rope({"rope_parameters": rope["full_attention"]})
        return full | {"rope_local_base_freq": local["rope_theta"]}
    if "rope_theta" not in rope:
        return {}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    is_scaled = scaling.get("rope_type", "default") != "default"
    older = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if is_scaled else None}
    if "partial_rotary_factor" in rope:
        older["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if kind.startswith("gpt_neox"):  # llama.cpp's converter stops without these
        older |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope.get("partial_rotary_factor", 1.0)}
    return older
