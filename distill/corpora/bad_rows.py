"""Rows that cannot be used: left out and counted by reason, and refused only where there are too many of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from decode.common.checked_json import Content, Count, Text
from decode.common.errors import InputError
from decode.common.progress import get_logger

MANY = 1000
"""Bad rows after which a corpus, which may have millions, is not read to its end to know their share: as many rows as
may hold so many are enough. Fewer are not, since bad ones may stand first."""
LONGEST = 500
"""Characters of a row's message that are kept as an example."""
Made = TypeVar("Made")

log = get_logger("distill")


class BadRow(InputError):
    """What is wrong with one row; `reason` is the same text for every row that has the fault, what stands around it is
    this one's."""

    def __init__(self, where: str, reason: str, found: str = "", before: str = "") -> None:
        super().__init__(where, reason, found, before)  # all of them, since ranks send errors to each other
        self.where, self.reason = where, reason
        self.message = f"{where}: {before}{reason}{found}"

    def __str__(self) -> str:
        return self.message


class LeftOut(Content):
    """Rows that have one fault."""

    rows: Count
    example: Text
    """What is wrong with the first of them, with its file and line."""


class BadRowCount(Content):
    """Rows of a corpus that were left out."""

    rows: Count
    """Rows read, those left out among them."""
    reasons: dict[Text, LeftOut]
    cut: Count = 0
    """Conversations that lost what the assistant says before anybody asks."""

    @property
    def left_out(self) -> int:
        """For whatever reason."""
        return sum(one.rows for one in self.reasons.values())

    def __bool__(self) -> bool:
        return bool(self.reasons or self.cut)

    def line(self) -> str:
        """How many, and an example of each kind."""
        cut = f"; {self.cut:,} begin with the assistant, whose words before the first question are dropped"
        return f"{self.left_out:,} of {self.rows:,} rows" + self.examples() + (cut if self.cut else "")

    def examples(self) -> str:
        """Rows of each kind, as a clause."""
        kinds = "; ".join(f"{one.rows:,} as {one.example}" for one in self.reasons.values())
        return f" ({kinds})" if kinds else ""


class BadRows:
    """The tally of a corpus, each row counted once however often it is read."""

    def __init__(self, where: str, share: float) -> None:
        """`share` of the rows may be bad; `where` names the corpus, for messages."""
        self.where, self.share, self.rows = where, share, 0
        self._places: dict[str, str] = {}
        self._examples: dict[str, str] = {}
        self._cut: set[str] = set()

    def add(self, bad: BadRow) -> None:
        """Count a row; raises InputError where it is one too many and the rest need not be read to say so."""
        if bad.where in self._places:
            return
        self._places[bad.where] = bad.reason
        self._examples.setdefault(bad.reason, str(bad)[:LONGEST])
        if len(self._places) >= MANY and (not self.share or self.share * self.rows >= MANY):
            self.check()

    def cut(self, where: str) -> None:
        """Count a conversation whose beginning was dropped."""
        self._cut.add(where)

    def attempt(self, make: Callable[..., Made], *given: Any) -> Made | None:
        """What `make` gives; None where that row is bad, which is counted."""
        try:
            return make(*given)
        except BadRow as bad:
            self.add(bad)
            return None

    def count(self) -> BadRowCount:
        """So far."""
        found = Counter(self._places.values())
        reasons = {reason: LeftOut(rows=found[reason], example=one) for reason, one in self._examples.items()}
        return BadRowCount(rows=self.rows, reasons=reasons, cut=len(self._cut))

    def check(self) -> None:
        """Raise InputError where more than the share is bad."""
        bad = len(self._places)
        if bad <= self.share * self.rows:
            return
        enough = min(1.0, math.ceil(100 * bad / self.rows) / 100)
        raise InputError(
            f"{self.where}: {bad:,} of {self.rows:,} rows read cannot be used, more than "
            f"data.bad_rows={self.share:g}{self.count().examples()}. Mend them, name their fields "
            f"(data.messages_field, data.text_field), or set data.bad_rows={enough:g}"
        )

    def report(self) -> BadRowCount:
        """Once all was read that is to be: raise InputError where too many are bad, and warn of those left out."""
        self.check()
        count = self.count()
        if count:
            log.warning("%s: left out %s", self.where, count.line())
        return count
