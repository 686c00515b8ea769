"""From the configured sampling to the arguments of `generate`, in one place for every stage that decodes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from decode.config import PENALTIES, SamplingConfig


def penalty_settings(config: SamplingConfig) -> dict[str, Any]:
    """Those of them that `decode.penalties` turns into processors, to be checked before weights are loaded."""
    return {name: getattr(config, name) for name in PENALTIES}


def generate_settings(config: SamplingConfig) -> dict[str, Any]:
    """Keyword arguments of `decode.generate`, which bear the names of the fields of SamplingConfig."""
    return {field.name: getattr(config, field.name) for field in fields(config)}
