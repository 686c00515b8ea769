"""Counters of drafted and accepted tokens, from the metrics that a server shows as Prometheus text."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$")
_NUMBER = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?")
"""NaN and Inf are none that can be counted."""
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PREFIX = "vllm:spec_decode_num_"
"""vLLM 0.32, vllm/v1/spec_decode/metrics.py; prometheus_client puts _total behind the names of counters."""
_BY_POSITION = f"{_PREFIX}accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class Counters:
    """What became of the drafts of a run, counted alike by the engine and by us."""

    drafts: int
    """Rounds in which something was drafted, over all requests."""
    drafted: int
    """Tokens that were drafted in them."""
    accepted: tuple[int, ...]
    """By position, how many drafts had their token there accepted."""

    def __sub__(self, before: Counters) -> Counters:
        """What came since `before`."""
        negative = tuple(-count for count in before.accepted)
        return self + Counters(-before.drafts, -before.drafted, negative)

    def __add__(self, other: Counters) -> Counters:
        """Of both."""
        assert len(self.accepted) == len(other.accepted), (self, other)
        places = zip(self.accepted, other.accepted, strict=True)
        return Counters(self.drafts + other.drafts, self.drafted + other.drafted, tuple(a + b for a, b in places))

    @property
    def by_position(self) -> list[float | None]:
        """P(token at a position is accepted | those before it were); None where none came so far."""
        reached = (self.drafts, *self.accepted)
        return [now / before if before else None for before, now in zip(reached, self.accepted, strict=False)]

    @property
    def tokens_per_draft(self) -> float | None:
        """Accepted ones and the target's own: what a target pass writes."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else None


def total(each: Sequence[Counters]) -> Counters:
    """Over all prompts."""
    return sum(each[1:], each[0])


def read_counters(metrics_text: str) -> Counters:
    """Counters since the server began, over all its engines; none at all where it drafts nothing."""
    sums: dict[str, float] = defaultdict(float)
    places: dict[int, float] = defaultdict(float)
    for name, labels, value in samples(metrics_text):
        position = labels.get("position", "")
        if name == _BY_POSITION and position.isdigit():
            places[int(position)] += value
        elif name.startswith(_PREFIX):
            sums[name] += value
    accepted = tuple(round(places[place]) for place in range(max(places, default=-1) + 1))
    return Counters(round(sums[f"{_PREFIX}drafts_total"]), round(sums[f"{_PREFIX}draft_tokens_total"]), accepted)


def read_running(metrics_text: str) -> int:
    """Requests that the server works on or has waiting."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return round(sum(value for name, _, value in samples(metrics_text) if name in names))


def samples(metrics_text: str) -> list[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of each line that holds a number; comments and what is no sample are passed over."""
    found = []
    for line in metrics_text.splitlines():
        match = _SAMPLE.match(line)
        name, labels, value = match.groups() if match else ("", None, "")
        if _NUMBER.fullmatch(value):
            found.append((name, dict(_LABEL.findall(labels or "")), float(value)))
    return found
