"""What a run keeps in its folder of a server, and of our decoder, so that it goes on with that when it is killed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from eval.modes.served.engine.metrics import Counters
from eval.modes.served.results import Verdict


class Reply(BaseModel, frozen=True):
    """What a server wrote and counted, by prompt."""

    texts: list[list[int]]
    counters: list[Counters]


class Timed(BaseModel, frozen=True):
    """Requests that were answered at one batch size."""

    batch_size: int
    requests: int
    tokens: int
    seconds: float
    energy: dict[str, Any]
    counters: Counters

    @property
    def tokens_per_s(self) -> float:
        """Of all of them together."""
        return self.tokens / self.seconds


class Asked(BaseModel, frozen=True):
    """One start of a server."""

    draft: str | None
    k: int
    round: int
    version: str
    """Of the engine."""
    answers: dict[str, Reply]
    """By temperature, where accepted tokens are compared."""
    speeds: list[Timed]
    start_s: float
    seconds: float


class Compared(BaseModel, frozen=True):
    """One draft at one temperature."""

    temperature: float
    counters: list[Counters]
    """Ours, by prompt."""
    verdict: Verdict
    same_texts: int | None
    faults: list[str]


class OurTimes(BaseModel, frozen=True):
    """Tokens per second at one batch size, by round."""

    batch_size: int
    drafted: list[float]
    alone: list[float]


class Here(BaseModel, frozen=True):
    """A draft in our decoder."""

    comparisons: list[Compared]
    speeds: list[OurTimes]
    energy: list[dict[str, Any]]
    dtype: str


def answers_of(asked: Sequence[Asked], draft: str) -> dict[str, Reply]:
    """By temperature, of the one server of a draft that was compared."""
    return next(one.answers for one in asked if one.draft == draft and one.answers)
