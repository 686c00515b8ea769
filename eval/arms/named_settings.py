"""Settings of ours that a configuration names by what they change in `decode`; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from decode.common.typed_config import require
from decode.config import SamplingConfig


def named_settings(
    changes_by_name: Mapping[str, Mapping[str, Any]], base: SamplingConfig, temperature: float, where: str
) -> dict[str, SamplingConfig]:
    """Name -> settings at one temperature. At 0 every rule is greedy, so those that differ in the rule alone are one.

    ConfigError, naming `where.NAME`, for a key that is no setting and for one that is not exact.
    """
    found: dict[str, SamplingConfig] = {}
    known = {one.name for one in fields(SamplingConfig)} - {"temperature", "max_new_tokens"}
    for name, changes in changes_by_name.items():
        unknown = sorted(set(changes) - known)
        require(not unknown, f"{where}.{name} has unknown keys {unknown}; known are {', '.join(sorted(known))}")
        greedy = {"verifier": "greedy", "replacement": False} if temperature == 0 else {}
        settings = replace(base, **{**changes, "temperature": temperature, **greedy})
        require(settings.verifier != "typical", f"{where}.{name} is lossy; the suite compares exact settings alone")
        if settings not in found.values():
            found[name] = settings
    return found
