"""What every timed mode's results say of energy, on machines with counters and without."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from eval.results.schema import Energy


def check_energy(results: Mapping[str, Any], arms: Collection[str]) -> None:
    """An entry for each of `arms`: joules per token, or null and a reason."""
    entries = [Energy.model_validate(one) for one in results["energy"]]
    assert {one.arm for one in entries} == set(arms)
    for one in entries:
        if one.kind is None:
            assert one.reason
            assert (one.joules_per_token, one.by_batch) == (None, None)
        else:
            assert one.reason is None
            assert one.joules_per_token is not None
            assert one.joules_per_token > 0


def check_estimated(results: Mapping[str, Any], arms: Collection[str]) -> None:
    """The same by stated watts."""
    check_energy(results, arms)
    assert {one["kind"] for one in results["energy"]} == {"estimate"}
