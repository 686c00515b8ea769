"""Which tokens may follow a prefix, for rows that are drafted tokens; transformers' `prefix_allowed_tokens_fn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from decode.common.typed_config import require

Allowed = Callable[[int, Tensor], Any]
"""(sequence, ids (length,)) -> ids of the tokens that may follow, where sequence counts those of the call."""


class Restriction(LogitsProcessor):
    """Tokens that may not follow a prefix get no chance.

    Where nothing may follow, scores stay as they are: rows that have ended, tokens drafted behind an end token and
    drafted tokens that may not stand where they stand are asked about as well, and nobody sees what would follow them.
    `refuse_dead_end` tells of those that count.
    """

    name: str
    """For messages: what restricts."""

    def __init__(self) -> None:
        self._dead: set[tuple[int, ...]] = set()

    def note_dead_end(self, request: int, ids: Sequence[int]) -> None:
        """Nothing may follow these tokens of a sequence."""
        self._dead.add((request, *ids))

    def refuse_dead_end(self, request: int, before: Sequence[int]) -> None:
        """Raise ConfigError where a token came after these ones, and none was allowed to."""
        require(
            (request, *before) not in self._dead,
            f"{self.name} allows no token after the {len(before)} tokens of sequence {request}, and none of them ends "
            "the text; let it allow one, an end token say",
        )


class AllowedTokens(Restriction):
    """Those that a function of the caller names. transformers' own goes by the row's place; this one is told which
    sequence a row belongs to."""

    name = "prefix_allowed_tokens_fn"

    def __init__(self, allowed: Allowed) -> None:
        super().__init__()
        self.allowed = allowed

    def __call__(self, input_ids: Tensor, scores: Tensor, requests: Tensor) -> Tensor:  # type: ignore[override]
        """ids (n, length), scores (n, V), requests (n,) -> (n, V)."""
        each = zip(requests.tolist(), input_ids, scores, strict=True)
        return torch.cat([self._of_row(request, ids, row[None]) for request, ids, row in each])

    def _of_row(self, request: int, ids: Tensor, scores: Tensor) -> Tensor:
        allowed = self.allowed(request, ids)
        if len(allowed) == 0:
            self.note_dead_end(request, ids.tolist())
            return scores
        return PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1)(ids[None], scores)  # type: ignore[arg-type]
