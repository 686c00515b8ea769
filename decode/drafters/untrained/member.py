"""A drafter inside another: it drafts for rounds in which other tokens than its own may have been accepted."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from decode.drafters.base import Context, Drafter

LEFT = 2
"""Tokens of a prompt that a drafter may leave unread."""


class Member:
    """One call's use of a drafter. A drafter with weights takes what was accepted for its own tokens, whose keys and
    values it has; here it is told how many tokens it has not seen, and reads them."""

    def __init__(self, drafter: Drafter, context: Context) -> None:
        self.drafter = context.lease.own(drafter)
        self._read = [0] * len(context.lengths)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """As the drafter does."""
        self.drafter.read(context, lengths)
        for row, length in lengths.items():
            self._read[row] = max(0, length - LEFT)

    def prepare(self, context: Context, lengths: Sequence[int]) -> Hashable | None:
        """As the drafter does, of rows of `lengths` committed tokens; None where it has nothing to draft."""
        rows = range(len(lengths)) if context.running is None else context.running
        behind = max((lengths[row] - self._read[row] for row in rows), default=0)
        runner = getattr(self.drafter, "runner", None)
        if runner is not None:  # a longer round may have been asked for last, which none of these tokens is of
            runner.unread = min(runner.unread, behind)
        prepared = self.drafter.prepare(replace(context, plain_rounds=max(0, behind - self._known)))
        if prepared is not None:
            self._read = list(lengths)
        return prepared

    @property
    def _known(self) -> int:
        """Tokens that it reads without being told."""
        return getattr(getattr(self.drafter, "runner", None), "unread", 0)

    def goes_on(self, rows: Collection[int], lengths: Sequence[int], plain_rounds: int) -> None:
        """In these rows its own tokens were judged, and of those that stand it knows by itself; of what rounds without
        drafts have brought since it does not."""
        for row in rows:
            self._read[row] = lengths[row] - plain_rounds - self._known
