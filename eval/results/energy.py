"""Joules per emitted token, as every timed mode's results have them: an entry for each arm and place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.arms.base import Sample
from eval.measure.energy import EnergyMeter
from eval.results.statistics import Estimate, bootstrap, bootstrap_crossed, described, median_of_ratios

Entry = Mapping[str, Any]
Pairs = Sequence[Sequence[float]]
ABOUT = ("where", "arm")
_FACTS = ("kind", "source", "reason")


def energy_pairs(samples: Sequence[Sequence[Sample]]) -> list[list[float]] | None:
    """[joules, emitted tokens] of each batch of prompts, summed over its rounds; None where a call was not metered."""
    found = []
    for group in samples:
        joules = [sample.joules for sample in group if sample.joules is not None]
        if len(joules) < len(group):
            return None
        found.append([sum(joules), float(sum(sample.tokens for sample in group))])
    return found


def energy_entry(where: str, arm: str, pairs: Pairs | None, meter: EnergyMeter, seed: int) -> dict[str, Any]:
    """The entry of an arm; `where` tells places of one run apart."""
    return _entry({"where": where, "arm": arm, **meter.facts()}, pairs, seed)


def joules_per_token(pairs: Pairs | None, seed: int) -> Estimate | None:
    """The median over batches of prompts, as speeds are; whole calls, prompts read included."""
    known = _known(pairs)
    return bootstrap(known, median_of_ratios, seed) if len(known) else None


def merged(entries: Iterable[Entry], seed: int) -> list[dict[str, Any]]:
    """One entry for each arm and place, of all that their rounds brought."""
    by_about: dict[tuple[Any, ...], list[Entry]] = {}
    for one in entries:
        by_about.setdefault(_about(one), []).append(one)
    return [_joined(each, seed) for each in by_about.values()]


def pooled_energy(runs: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """The key `energy` for runs on the same prompts, with intervals over runs and prompts; None, or no such key, where
    a run is of a time before energy was metered."""
    if all("energy" not in run for run in runs):
        return {}
    if any(run.get("energy") is None for run in runs):
        return {"energy": None}
    tables = [{_about(one): one for one in run["energy"]} for run in runs]
    shared = [key for key in tables[0] if all(key in one for one in tables)]
    return {"energy": [_crossed([table[key] for table in tables], seed) for key in shared]}


def energy_of(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Entries of timed cells."""
    return [dict(one) for cell in cells for one in cell["energy"]]


def same_facts(entries: Sequence[Entry]) -> dict[str, str | None]:
    """What was read for all of them, or why they have no common figure: the reason of one that has none, or that an
    estimate and a measurement, or counters of different parts, do not add up."""
    first = {name: entries[0].get(name) for name in _FACTS}
    for one in entries:
        if (reason := one.get("reason")) is not None:
            return {"kind": None, "source": None, "reason": reason}
    for one in entries[1:]:
        if {name: one.get(name) for name in _FACTS} != first:
            reason = f"metered in different ways: {first['source']} ({first['kind']}), {one['source']} ({one['kind']})"
            return {"kind": None, "source": None, "reason": reason}
    return first


def _joined(each: Sequence[Entry], seed: int) -> dict[str, Any]:
    facts = same_facts(each)
    pairs = None if facts["kind"] is None else [pair for one in each for pair in one["by_batch"] or []]
    return _entry({**_named(each[0]), **facts}, pairs, seed)


def _crossed(each: Sequence[Entry], seed: int) -> dict[str, Any]:
    facts = same_facts(each)
    runs = [_known(one["by_batch"]) for one in each]
    has_all = facts["kind"] is not None and len({len(one) for one in runs}) == 1 and len(runs[0]) > 0
    estimate = bootstrap_crossed(np.stack(runs), median_of_ratios, seed) if has_all else None
    if estimate is not None and len(runs[0]) == 1:
        estimate = Estimate(estimate.value, None)  # runs alone say nothing of other prompts
    return {**_named(each[0]), **facts, **described("joules_per_token", estimate), "by_batch": None}


def _entry(about: dict[str, Any], pairs: Pairs | None, seed: int) -> dict[str, Any]:
    by_batch = None if pairs is None else [list(pair) for pair in pairs]
    return {**about, **described("joules_per_token", joules_per_token(pairs, seed)), "by_batch": by_batch}


def _known(pairs: Pairs | None) -> np.ndarray:  # (n, 2)
    """Batches that emitted something."""
    every = np.array(pairs or [], dtype=float).reshape(-1, 2)
    return every[every[:, 1] > 0]


def _about(one: Entry) -> tuple[Any, ...]:
    return tuple(one[name] for name in ABOUT)


def _named(one: Entry) -> dict[str, Any]:
    return {name: one[name] for name in ABOUT}
