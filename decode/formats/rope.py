"""Rotary positions as config.json says them: `rope_parameters`, or as older ones `rope_theta` with `rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT_BASE = 10000.0
"""What engines and transformers take where nothing is said."""
FACTOR_BY_LENGTH = ("yarn", "longrope")
"""Kinds whose factor, where it is left out, is max_position_embeddings by the original length."""


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
