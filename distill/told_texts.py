"""What a person is told while texts are made: prompts, as their last response ends, and tokens a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from decode.common.progress import Progress
from distill.records.record_shards import Record
from distill.records.recorded_drafts import Drafting


class ToldTexts:
    """Counts on a progress bar of prompts."""

    def __init__(self, bar: Progress, take: Callable[[Record, Tensor | None], None] | None = None) -> None:
        """`take` is given each record as it ends, before it counts."""
        self.bar, self.take = bar, take
        self.began, self.tokens = time.perf_counter(), 0
        self._told = self._heard = 0
        """Prompts of the shard in hand that are on the bar, and the tokens of its records that have ended."""

    def ended(self, record: Record, states: Tensor | None, is_last: bool) -> None:
        """As `distill.responses.Ended`."""
        if self.take is not None:
            self.take(record, states)
        tokens = int(record.loss_mask.sum())
        self.tokens, self._heard = self.tokens + tokens, self._heard + tokens
        self._told += is_last
        self._tell(int(is_last))

    def shard(self, prompts: int, records: Sequence[Record] | None = None, drafting: Drafting | None = None) -> None:
        """A shard of so many prompts is done, those included of which no response ended: of a corpus none does."""
        learned = None if records is None else sum(int(record.loss_mask.sum()) for record in records)
        self.tokens += 0 if learned is None else learned - self._heard
        self._heard = 0
        left, self._told = prompts - self._told, 0
        self._tell(left, **({} if drafting is None else {"tokens_per_pass": round(drafting.tokens_per_pass, 2)}))

    def _tell(self, prompts: int, **shown: object) -> None:
        self.bar.update(prompts, tokens_per_s=round(self.tokens / (time.perf_counter() - self.began)), **shown)
