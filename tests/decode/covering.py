"""Few cases that still hold every pair of levels together: a covering array, built greedily and always alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def product(factors: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool]) -> list[Case]:
    """Every case that is valid."""
    cases = (dict(zip(factors, levels, strict=True)) for levels in itertools.product(*factors.values()))
    return [case for case in cases if valid(case)]


def covering_cases(
    factors: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool], whole: Sequence[str]
) -> list[Case]:
    """Cases in which every pair of levels of two factors meets, as far as any valid case has it, and every combination
    of the factors `whole`: for each of these the case with the most pairs that are still missing."""
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in product(factors, valid):
        groups.setdefault(tuple(case[name] for name in whole), []).append(case)
    missing = {pair for cases in groups.values() for case in cases for pair in _pairs(case)}
    chosen = []
    for cases in groups.values():
        chosen.append(_best(cases, missing, len(chosen)))
        missing -= _pairs(chosen[-1])
    while missing:
        chosen.append(_best([case for cases in groups.values() for case in cases], missing, 0))
        missing -= _pairs(chosen[-1])
    return chosen


def _best(cases: list[Case], missing: set[Any], turn: int) -> Case:
    """Of equals another one each time, so that later levels get their share as well."""
    turned = cases[turn % len(cases) :] + cases[: turn % len(cases)]
    return max(turned, key=lambda case: len(_pairs(case) & missing))


def _pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(case.items(), 2))
