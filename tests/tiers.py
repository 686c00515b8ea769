"""Which cases of a parametrized test the default tier runs; the slow one runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(wanted: int, values: Iterable[Any]) -> list[Any]:
    """The first `wanted` values as they are, the others marked slow; a tuple is the values of several names."""
    every = list(values)
    assert 0 < wanted < len(every), (wanted, every)
    return every[:wanted] + [_slow(one) for one in every[wanted:]]


def spread(wanted: int, values: Iterable[Any]) -> list[Any]:
    """So many values over the whole table as they are, its first and last among them; the others marked slow."""
    every = list(values)
    assert 1 < wanted < len(every), (wanted, every)
    kept = {round(i * (len(every) - 1) / (wanted - 1)) for i in range(wanted)}
    return [one if i in kept else _slow(one) for i, one in enumerate(every)]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
