"""Several texts in one row of tokens."""

from __future__ import annotations

BETWEEN = -1
"""Stands behind every text, and is no token."""


def until_end(tokens: list[int]) -> list[int]:
    """Those of the first text."""
    return tokens[: tokens.index(BETWEEN)] if BETWEEN in tokens else tokens
