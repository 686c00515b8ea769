"""Arguments of one kind that are given as another: converted where nothing is lost, refused where they would be read as
something else (True as 1, "false" as true, 1.5 as 1)."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from decode.common.typed_config import require


def whole(value: Any, name: str, least: int | None = None) -> int:
    """An int, numpy's and tensors of one number included; raises ConfigError below `least` and for anything else."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    require(number is not None, f"{name}={value!r} is of type {type(value).__name__}; give a whole number")
    assert number is not None
    require(least is None or number >= least, f"{name}={number} is too small; give {least} or more")
    return number


def real(value: Any, name: str) -> float:
    """A float, numpy's and tensors of one number included; raises ConfigError for texts, truth values and the like."""
    try:
        number = None if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    require(number is not None, f"{name}={value!r} is of type {type(value).__name__}; give a number")
    assert number is not None
    return number


def flag(value: Any, name: str) -> bool:
    """True or False itself: any text that is not empty would count as true."""
    require(isinstance(value, bool), f"{name}={value!r} is of type {type(value).__name__}; give True or False")
    return value


def wholes(values: Any, name: str) -> list[int]:
    """A list of ints from one number, several, or a tensor of them; raises ConfigError."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    return [whole(one, name) for one in (values if _is_many(values) else [values])]


def texts(values: Any, name: str) -> tuple[str, ...]:
    """Texts from one or several, none of them empty, as that is found everywhere; raises ConfigError."""
    found = (values,) if isinstance(values, str) else tuple(values) if _is_many(values) else (values,)
    wrong = [one for one in found if not isinstance(one, str)]
    require(not wrong, f"{name}={values!r} holds {wrong}, which are no texts; give str")
    require("" not in found, f"{name}={values!r} holds an empty text, which is found everywhere; leave it out")
    return found


def _is_many(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, str | bytes)
