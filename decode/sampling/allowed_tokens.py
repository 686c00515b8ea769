"""transformers' `prefix_allowed_tokens_fn`, for rows that are drafted tokens."""

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


class AllowedTokens(LogitsProcessor):
    """Tokens that are not allowed get no chance. transformers' own goes by the row's place; this one is told which
    sequence a row belongs to.

    Where nothing is allowed, scores stay as they are: rows that have ended and tokens drafted behind an end token are
    asked about as well, and nobody sees what would follow them. `refuse_dead_end` tells of those that count.
    """

    def __init__(self, allowed: Allowed) -> None:
        self.allowed = allowed
        self._dead: set[tuple[int, ...]] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor, requests: Tensor) -> Tensor:  # type: ignore[override]
        """ids (n, length), scores (n, V), requests (n,) -> (n, V)."""
        each = zip(requests.tolist(), input_ids, scores, strict=True)
        return torch.cat([self._of_row(request, ids, row[None]) for request, ids, row in each])

    def _of_row(self, request: int, ids: Tensor, scores: Tensor) -> Tensor:
        allowed = self.allowed(request, ids)
        if len(allowed) == 0:
            self._dead.add((request, *ids.tolist()))
            return scores
        return PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1)(ids[None], scores)  # type: ignore[arg-type]

    def refuse_dead_end(self, request: int, before: Sequence[int]) -> None:
        """Raise ConfigError where a token came after these ones, and none was allowed to."""
        require(
            (request, *before) not in self._dead,
            f"prefix_allowed_tokens_fn allows no token after the {len(before)} tokens of sequence {request}, and none "
            "of them ends the text; let it allow one, an end token say",
        )
