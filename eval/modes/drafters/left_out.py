"""Arms that do not run, in words."""

from __future__ import annotations

from collections.abc import Mapping


def by_reason(left_out: Mapping[str, str]) -> str:
    """Of arm -> reason: arms of one reason together, the reason once."""
    arms: dict[str, list[str]] = {}
    for arm, reason in left_out.items():
        arms.setdefault(reason, []).append(arm)
    return "; ".join(f"{', '.join(names)} ({reason.rstrip('.')})" for reason, names in arms.items())
