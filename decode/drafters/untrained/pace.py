"""How long the chains of a mixture's round are to be, and who drafts: what pays by what has been seen to stand and the
seconds that rounds have taken.

A round of length L for which a draft makes d tokens costs t(L) + t_draft(d) seconds and brings 1 + the chances of its
tokens. The best one is that of most tokens less their price, which is the tokens that the same seconds have brought in
the last rounds (the optimal stopping rule of a renewal process). All of it is known before anything is sampled, so
that sampled chains keep their distribution.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median_low

from decode.autotune.estimates import FORGET, KEPT
from decode.trees.tree_plans import Shape

LENGTHS = (1, 2, 3, 5, 8, 12, 20, 32, 48, 72, 112, 168, 256, 384, 576, 864)
"""That chains are cut to: each is a capture of its own, of 3 s with a target of 135M parameters on two cores."""


def lengths_of(shape: Shape, own: Iterable[int] = ()) -> tuple[int, ...]:
    """That rounds may have where `shape` is asked for, of drafts that draft `own` tokens of it; trees are as deep as
    that."""
    shorter = {one for one in (*LENGTHS, *own) if 0 < one < shape.depth} if shape.is_chain else set()
    return (*sorted(shorter), shape.depth)


@dataclass(frozen=True)
class Plan:
    """Of a round."""

    length: int
    """Of all chains; 0 is a round without drafts."""
    member: int | None = None
    """The member with weights that is asked."""
    depth: int = 0
    """Tokens that it is asked for."""


@dataclass(frozen=True)
class Offer:
    """What a member with weights would draft."""

    chances: Sequence[float]
    """P(its first 1, 2, ... tokens stand)."""
    seconds: Sequence[float]
    """That 0, 1, 2, ... tokens take."""


def best_plan(
    texts: Sequence[Sequence[Sequence[float]]],
    offers: Mapping[int, Offer],
    rests: Sequence[float],
    price: float,
    lengths: Sequence[int],
    cut: bool = True,
) -> Plan:
    """The plan of most expected tokens less `price` a second, the first and shortest of equals.

    texts: by row, of each guess that costs nothing, P(its first 1, 2, ... tokens stand); a row takes the one of which
    most is expected to stand of the round's length, or a draft's. rests: seconds of a round but for drafting, by length
    from 0 on. `lengths` are those that the round may have; a draft drafts as many tokens as one of them, or all it can,
    without `cut` always all.
    """
    free = [[max((standing(one, length) for one in row), default=0.0) for length in lengths] for row in texts]
    best, worth = Plan(0), -price * rests[0]
    for member, depth in [(None, 0), *_asked(offers, lengths, cut)]:
        offer = offers[member].chances[:depth] if member is not None else ()
        drafting_s = offers[member].seconds[depth] if member is not None else 0.0
        for place, length in enumerate(lengths):
            drafted = standing(offer, length)
            gain = sum(max(row[place], drafted) for row in free)
            value = gain - price * (rests[length] + drafting_s)
            if length >= depth and gain and value > worth:
                best, worth = Plan(length, member, depth), value
    return best


def standing(chances: Sequence[float], length: int) -> float:
    """Tokens of the first `length` ones that are expected to stand."""
    return sum(chances[:length])


def _asked(offers: Mapping[int, Offer], lengths: Sequence[int], cut: bool) -> Iterator[tuple[int, int]]:
    """(member, tokens that it may be asked for)."""
    for member, offer in offers.items():
        most = min(len(offer.chances), lengths[-1])
        shorter = [one for one in lengths if one < most] if cut else []
        yield from ((member, depth) for depth in (*shorter, most))


STALE = 512
"""Times of other sizes after which a size is forgotten: a machine changes its pace, and one that was timed on a slow
day would never be chosen again."""


class Times:
    """Seconds by size: on a line through what is typical of those that were timed."""

    def __init__(self, typical: Callable[[Iterable[float]], float]) -> None:
        self._typical = typical
        self._seen: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}
        self._count = 0

    @property
    def num_sizes(self) -> int:
        """That have been timed."""
        return len(self._seen)

    def learn(self, size: int, seconds: float) -> None:
        """One more time."""
        self._count += 1
        self._last[size] = self._count
        self._seen.setdefault(size, deque(maxlen=KEPT)).append(seconds)
        self._seen = {one: times for one, times in self._seen.items() if self._last[one] > self._count - STALE}

    def up_to(self, size: int) -> list[float]:
        """Of 0, 1, ... `size`; in proportion where one size alone was timed, 0 where none was."""
        seen = list(self._seen.items())  # at once: other calls may share it
        sizes, seconds = [one for one, _ in seen], [self._typical(list(times)) for _, times in seen]
        if len(sizes) < 2:
            return [sum(seconds) * one / max(1, *sizes, 1) for one in range(size + 1)]
        slope, least = linear_regression(sizes, seconds)
        return [least + max(0.0, slope) * one for one in range(size + 1)]


class Pace:
    """What rounds of one number of rows have taken, by their length, and what they have brought."""

    def __init__(self) -> None:
        self._times = Times(median_low)
        self._emitted = self._seconds = 0.0

    def time(self, length: int, seconds: float) -> None:
        """A round took so long, but for drafting."""
        self._times.learn(length, seconds)

    def earn(self, emitted: int, seconds: float) -> None:
        """A round emitted so many tokens in all, in so long with its drafting."""
        self._emitted = FORGET * self._emitted + emitted
        self._seconds = FORGET * self._seconds + seconds

    @property
    def has_timed(self) -> bool:
        """Whether any length has."""
        return self._times.num_sizes > 0

    def rests(self, depth: int) -> list[float] | None:
        """Seconds of a round but for drafting, by length from 0 to `depth`; None before two lengths were timed."""
        return self._times.up_to(depth) if self._times.num_sizes > 1 else None

    @property
    def price(self) -> float:
        """Tokens that a second is worth; 0 before anything is known."""
        return self._emitted / self._seconds if self._seconds else 0.0
