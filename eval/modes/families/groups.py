"""Seeds put together: every arm, budget and code of features as one entry, with intervals over seeds and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decode.acceptance import acceptance_by_position
from eval.modes.families.trainings import Training
from eval.results.figures import described
from eval.results.statistics import Estimate, bootstrap_crossed, finite, ratio_of_ratios, ratio_of_sums

Kept = Mapping[Training, dict[str, Any]]
"""Training -> what is kept of it: its own fields, `pace` and `measured` (see Judge.measure)."""


@dataclass(frozen=True)
class Group:
    """All seeds of one arm, budget and code."""

    arm: str
    budget: str
    code: str
    is_coded: bool = False

    @classmethod
    def of(cls, one: Training) -> Group:
        """The group of a training."""
        return cls(one.arm, one.budget, one.code, one.is_coded)


@dataclass(frozen=True)
class Outcome:
    """What became of a round's draft."""

    drafted: int
    accepted: int


def grouped(kept: Kept) -> dict[Group, list[dict[str, Any]]]:
    """Group -> what is kept of its trainings, by seed."""
    found: dict[Group, list[dict[str, Any]]] = {}
    for one in sorted(kept, key=lambda one: one.seed):
        found.setdefault(Group.of(one), []).append(kept[one])
    return found


def measured(entries: Sequence[dict[str, Any]], temperature: float, shape: str) -> list[dict[str, Any]]:
    """Of every seed, what was measured at that temperature and shape; [] where the shape is another one's there."""
    return [
        one
        for entry in entries
        for one in entry["measured"]
        if (one["temperature"], one["shape"]) == (temperature, shape)
    ]


def counts(found: Sequence[dict[str, Any]]) -> np.ndarray:  # (seeds, prompts, 2)
    """Tokens emitted and target passes."""
    return np.array([one["counts"] for one in found], dtype=float)


def quality_row(group: Group, found: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """tau, acceptance by position and losslessness over all seeds of a group."""
    each = counts(found)
    rounds = [Outcome(drafted, accepted) for one in found for drafted, accepted, n in one["outcomes"] for _ in range(n)]
    by_position = acceptance_by_position(rounds, max((one.drafted for one in rounds), default=0))
    return {
        "arm": group.arm,
        "budget": group.budget,
        "code": group.code,
        "shape": found[0]["shape"],
        "temperature": found[0]["temperature"],
        "num_draft_tokens": found[0]["num_draft_tokens"],
        **described("tau", bootstrap_crossed(each, ratio_of_sums, seed)),
        "tau_by_seed": [float(ratio_of_sums(one[None])[0]) for one in each],
        "acceptance_by_position": [finite(value) for value in by_position],
        **{name: sum(one[name] for one in found) for name in ("mismatches", "near_ties", "tokens_checked")},
    }


def tau_ratio(ours: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], seed: int) -> Estimate:
    """tau of one group over that of another, paired by seed and prompt."""
    return bootstrap_crossed(np.concatenate([counts(ours), counts(other)], axis=-1), ratio_of_ratios, seed)


def training_row(group: Group, entries: Sequence[dict[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What training the group took: means over seeds. `facts` are the arm's own, as results.json has them."""
    paces = [entry["pace"] for entry in entries]
    seconds, tokens = (float(np.mean([pace[name] for pace in paces])) for name in ("seconds", "tokens"))
    return {
        "arm": group.arm,
        "budget": group.budget,
        "code": group.code,
        **facts,
        "seeds": len(paces),
        "steps": float(np.mean([pace["steps"] for pace in paces])),
        "tokens": tokens,
        "seconds": seconds,
        "seconds_by_seed": [pace["seconds"] for pace in paces],
        "tokens_per_s": tokens / seconds,
    }
