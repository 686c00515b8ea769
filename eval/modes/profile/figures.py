"""From calls and their bare passes to the figures of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from eval.modes.profile.calls import Call, Classes
from eval.results.schema import Interval
from eval.results.statistics import bootstrap, described

OUT_OF_ROUND = ("host", "other")
"""Of the parts of a call; all other phases make up the round itself."""


class ProfiledArm(BaseModel, frozen=True):
    """One way to decode: medians over calls, which another program on the machine moves less than means."""

    name: str
    calls: int
    tokens_per_round: float
    tokens_per_s: float
    prefill_ms_per_call: float
    ms_per_round: dict[str, float]
    floor_ms_per_round: dict[str, float]
    outside_passes_ms: float
    outside_passes_ms_ci95: Interval | None
    operators_ms_per_round: dict[str, Classes]


class Profile(BaseModel, frozen=True):
    """The content of profile.json."""

    schema_version: int = Field(alias="schema")
    environment: dict[str, Any]
    target: dict[str, Any]
    drafts: dict[str, str]
    decode: dict[str, Any]
    temperature: float
    batch_size: int
    prompts: int
    new_tokens: int
    arms: list[ProfiledArm]
    energy: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Turn:
    """A call, and its bare passes timed right behind it."""

    call: Call
    floor: dict[str, float]
    joules: float | None = None
    """Of the call."""

    @property
    def round_ms(self) -> float:
        """One round: draft, target, verdict and commit."""
        parts = self.call.ms_per_round()
        return sum(ms for phase, ms in parts.items() if phase not in OUT_OF_ROUND)


def entry(name: str, turns: Sequence[Turn], operators: tuple[dict[str, Classes], int]) -> ProfiledArm:
    """From its calls, and from one under the profiler."""
    calls, (seconds, rounds) = [one.call for one in turns], operators
    each = [call.ms_per_round() for call in calls]
    phases = {phase: median(one[phase] for one in each) for phase in each[0]}
    return ProfiledArm(
        name=name,
        calls=len(calls),
        tokens_per_round=sum(call.tokens for call in calls) / sum(call.rounds for call in calls),
        tokens_per_s=median(call.tokens / call.seconds for call in calls),
        prefill_ms_per_call=1e3 * median(call.phases["prefill"] for call in calls),
        ms_per_round=phases,
        floor_ms_per_round={kind: median(one.floor[kind] for one in turns) for kind in turns[0].floor},
        **outside(turns),
        operators_ms_per_round={
            phase: _classes(seconds[phase], rounds, ms) for phase, ms in phases.items() if phase in seconds
        },
    )


def joules_of(turns: Sequence[Turn]) -> list[list[float]] | None:
    """[joules, tokens] of every call; None where none was metered."""
    known = [[one.joules, float(one.call.tokens)] for one in turns if one.joules is not None]
    return known or None


def outside(turns: Sequence[Turn]) -> dict[str, Any]:
    """What a round takes beyond its bare passes, each call against those timed beside it."""
    left = np.array([[one.round_ms - sum(one.floor.values())] for one in turns])
    return described("outside_passes_ms", bootstrap(left, lambda drawn: np.median(drawn[..., 0], axis=-1), 0))


def _classes(seconds: Classes, rounds: int, phase_ms: float) -> Classes:
    """Operators of the profiled call per round; what they leave of the phase, timed without the profiler, is Python."""
    found = {kind: 1e3 * value / rounds for kind, value in seconds.items()}
    return {**found, "Python gap": max(0.0, phase_ms - sum(found.values()))}
