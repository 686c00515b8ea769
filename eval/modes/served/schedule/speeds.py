"""Tokens/s of servers by draft length and batch size. Each arm is a server of its own, since the length is fixed when
it starts; each round starts all of them anew, in a drawn order, so that ratios are of the same hour and the error bar
holds what one process has over the next."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.common.progress import progress
from eval.measure.cells import Results
from eval.modes.served.engine.client import complete
from eval.modes.served.engine.metrics import Counters
from eval.modes.served.engine.server import Server, running
from eval.modes.served.schedule.schedule import LEAST_ROUNDS, Speed

_LEAST_REQUESTS = 8  # of a timed batch size; one request of a fast target is over in a fraction of a second
_WARM_UP_TOKENS = 8
"""First calls allocate and compile."""


@dataclass(frozen=True)
class Arm:
    """A server that is timed."""

    name: str
    """For files and messages."""
    k: int
    """Draft tokens of a round."""
    command: Sequence[str]


@dataclass(frozen=True)
class Timing:
    """How all arms are timed."""

    batch_sizes: Sequence[int]
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    """Of a request, at temperature 0."""
    rounds: int
    seed: int
    environment: Mapping[str, str]
    start_s: float
    """That a server may take until it answers."""

    def __post_init__(self) -> None:
        assert self.rounds >= LEAST_ROUNDS, "an interval takes two rounds"

    def asked(self, batch_size: int) -> list[Sequence[int]]:
        """Prompts of a measurement: at least two for each place of the batch, the same for all arms."""
        count = batch_size * max(2, -(-_LEAST_REQUESTS // batch_size))
        return [self.prompts[i % len(self.prompts)] for i in range(count)]


@dataclass(frozen=True)
class Timed:
    """What an arm gave."""

    arm: Arm
    speeds: list[Speed]
    """By batch size."""
    counters: Counters
    """Of all rounds and batch sizes."""


def measure_speeds(arms: Sequence[Arm], timing: Timing, results: Results) -> list[Timed]:
    """All arms, in their order; what `results` holds of an earlier run is not measured again. ServerGoneError where a
    server dies."""
    rounds: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    assert len(rounds) == len(arms), "names of arms are unique"
    with progress(timing.rounds * len(arms), "servers", "speeds") as bar:
        for turn in range(timing.rounds):
            for arm in random.Random(f"{timing.seed}/{turn}").sample(list(arms), len(arms)):
                rounds[arm.name].append(_kept(arm, timing, results, turn))
                bar.update(1)
    return [_timed(arm, timing, rounds[arm.name]) for arm in arms]


def _kept(arm: Arm, timing: Timing, results: Results, turn: int) -> dict[str, Any]:
    name = f"speeds/{arm.name}-{turn}.json"
    found = results.read(name)
    if found is None:
        log = results.folder.file(f"logs/{arm.name}-{turn}.log")
        found = _one_start(arm, timing, log)
        results.keep(name, found)
    return found


def _one_start(arm: Arm, timing: Timing, log: Path) -> dict[str, Any]:
    with running(arm.command, timing.environment, log, timing.start_s) as server:
        for size in timing.batch_sizes:
            complete(server, timing.asked(size)[:size], _WARM_UP_TOKENS, 0.0, None, size)
        before = server.counters()
        speeds = {str(size): _tokens_per_s(server, timing, size) for size in timing.batch_sizes}
        counted = server.counters() - before
    return {
        "tokens_per_s": speeds,
        "drafts": counted.drafts,
        "drafted": counted.drafted,
        "accepted": list(counted.accepted),
    }


def _tokens_per_s(server: Server, timing: Timing, batch_size: int) -> float:
    """From the first question to the last answer, prompts included."""
    done = complete(server, timing.asked(batch_size), timing.new_tokens, 0.0, None, batch_size)
    return done.tokens / done.seconds


def _timed(arm: Arm, timing: Timing, rounds: Sequence[Mapping[str, Any]]) -> Timed:
    speeds = [
        Speed(size, arm.k, tuple(one["tokens_per_s"][str(size)] for one in rounds)) for size in timing.batch_sizes
    ]
    counted = [Counters(one["drafts"], one["drafted"], tuple(one["accepted"])) for one in rounds]
    return Timed(arm, speeds, sum(counted[1:], start=counted[0]))
