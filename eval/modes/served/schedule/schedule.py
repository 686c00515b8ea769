"""How many tokens to draft at each batch size, from speeds that were measured there.

With tokens/s of two rounds,

    batch size    k = 0       k = 2       k = 4
    1             100  102    150  151    180  184
    8             400  398    420  380    300  310

k = 4 is chosen at batch size 1, and k = 0 at 8: k = 2 is faster in one round there and slower in the other.

The rule: begin with the shortest draft, and take a longer one only where it is faster beyond the error bar: the 95%
interval of the mean log ratio of the two speeds, paired round by round (Student's t, rounds - 1 degrees of freedom).
What is not certain to pay is not drafted, since a draft that is too long costs most where the batch is large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

Lengths = dict[int, tuple[float, ...]]
"""Draft length -> tokens/s by round."""
LEAST_ROUNDS = 2
"""One says nothing of the error."""


@dataclass(frozen=True)
class Speed:
    """What one draft length gave at one batch size."""

    batch_size: int
    """Requests at once."""
    k: int
    """Draft tokens a round; 0 drafts none."""
    tokens_per_s: tuple[float, ...]
    """Of all requests together, by round of the measurement; the same rounds for all draft lengths."""

    def __post_init__(self) -> None:
        assert self.batch_size >= 1
        assert self.k >= 0
        assert len(self.tokens_per_s) >= LEAST_ROUNDS, "an interval takes two rounds"
        assert all(0 < one < math.inf for one in self.tokens_per_s), self.tokens_per_s


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one draft length is as another."""

    value: float
    ci95: tuple[float, float]

    @property
    def is_faster(self) -> bool:
        """Beyond the error bar."""
        return self.ci95[0] > 1.0


@dataclass(frozen=True)
class Choice:
    """The draft length of one batch size."""

    batch_size: int
    k: int
    over_plain: Ratio
    """Its speed over that of the target alone."""
    fastest: int
    """The length that was fastest on the mean, beyond the error bar or not."""
    fastest_over_plain: Ratio


def ratio(ours: Sequence[float], other: Sequence[float]) -> Ratio:
    """Geometric mean of ours / other by round, with its interval."""
    logs = [math.log(a / b) for a, b in zip(ours, other, strict=True)]
    mean, half = fmean(logs), _half_width(logs)
    return Ratio(math.exp(mean), (math.exp(mean - half), math.exp(mean + half)))


def choices(candidates: Iterable[Speed], plain: Iterable[Speed]) -> list[Choice]:
    """One for each batch size, ascending, of the lengths that were measured there; `plain` is the target alone."""
    by_size: dict[int, Lengths] = {}
    for one in candidates:
        lengths = by_size.setdefault(one.batch_size, {})
        assert one.k not in lengths, f"k={one.k} twice at batch size {one.batch_size}"
        lengths[one.k] = one.tokens_per_s
    alone = {one.batch_size: one.tokens_per_s for one in plain}
    return [_choice(size, by_size[size], alone[size]) for size in sorted(by_size)]


def per_batch_size(chosen: Sequence[Choice]) -> list[tuple[int, int, int]]:
    """[(from, to, k), ...], inclusive, from 1 to the largest batch size measured, with no gap; neighbours of equal k
    are one. Between two measured batch sizes the shorter of their two drafts stands."""
    found: list[tuple[int, int, int]] = []
    for one in sorted(chosen, key=lambda choice: choice.batch_size):
        measured_to, k_before = found[-1][1:] if found else (0, one.k)
        between = (measured_to + 1, one.batch_size - 1, min(k_before, one.k))
        for start, end, k in (between, (one.batch_size, one.batch_size, one.k)):
            if start > end:
                continue
            if found and found[-1][2] == k:
                found[-1] = (found[-1][0], end, k)
            else:
                found.append((start, end, k))
    return found


def one_length(candidates: Sequence[Speed], plain: Sequence[Speed]) -> Choice:
    """For an engine that drafts equally long at every batch size: the same rule for the geometric mean of the speeds at
    all of them, round by round. Its batch size is 0, which stands for all."""
    lengths = sorted({one.k for one in candidates})
    pooled = {k: _pooled([one.tokens_per_s for one in candidates if one.k == k]) for k in lengths}
    return _choice(0, pooled, _pooled([one.tokens_per_s for one in plain]))


def _choice(batch_size: int, lengths: Lengths, plain: tuple[float, ...]) -> Choice:
    shortest, *longer = sorted(lengths)
    best = shortest
    for k in longer:
        if ratio(lengths[k], lengths[best]).is_faster:
            best = k
    over_plain = {k: ratio(speeds, plain) for k, speeds in lengths.items()}
    fastest = max(lengths, key=lambda k: over_plain[k].value)
    return Choice(batch_size, best, over_plain[best], fastest, over_plain[fastest])


def _pooled(speeds: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(math.exp(fmean(map(math.log, of_round))) for of_round in zip(*speeds, strict=True))


def _half_width(logs: Sequence[float]) -> float:
    from scipy import stats  # up to a second, which a plan or a wrong setting would wait for

    return float(stats.t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
