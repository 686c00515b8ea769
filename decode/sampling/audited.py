"""Processors on trial: asked three times instead of once, and refused by name where the answers differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from decode.common.typed_config import require
from decode.sampling.processors import name_of, processed

RTOL, ATOL = 1e-3, 1e-4  # of answers that differ by rounding alone: a processor may hold a network


class Audited(LogitsProcessor):
    """A processor that is asked three times instead of once: for the rows, for the same rows in the opposite order, and
    for the first prefix of all, whose answer is kept. Raises ConfigError where the answers differ.

    Speculative decoding takes processors for functions of the tokens and the scores: drafted tokens are put before
    them as well, some of them again in the next round and all nodes of a depth as rows of one call. One that counts its
    calls, or knows its rows by their place, would make the text depend on the draft.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self._first: tuple[Tensor, ...] | None = None
        self._answer: Tensor | None = None

    def __call__(  # type: ignore[override]
        self, input_ids: Tensor, scores: Tensor, prompt_lengths: Tensor, requests: Tensor
    ) -> Tensor:
        """ids (n, length), scores (n, V), prompt_lengths (n,), requests (n,) -> (n, V)."""
        asked = (input_ids, scores, prompt_lengths, requests)
        done = self._ask(*asked)
        self._require_same(done, self._ask(*(one.flip(0) for one in asked)).flip(0))
        if self._first is None:
            self._first = tuple(one[:1].clone() for one in asked)
            self._answer = done[:1].clone()
        assert self._answer is not None
        self._require_same(self._answer, self._ask(*self._first))
        self._require_a_choice(done)
        return done

    def _ask(self, input_ids: Tensor, scores: Tensor, prompt_lengths: Tensor, requests: Tensor) -> Tensor:
        shown = input_ids.clone()
        done = processed([self.processor], shown, scores.clone(), prompt_lengths, requests)
        require(
            torch.equal(shown, input_ids),
            f"logits processor {name_of(self.processor)} writes to the input_ids that it is shown, which the "
            "processors after it are shown too. Let it work on a copy",
        )
        return done

    def _require_same(self, one: Tensor, other: Tensor) -> None:
        require(
            torch.allclose(one, other, rtol=RTOL, atol=ATOL, equal_nan=True),
            f"logits processor {name_of(self.processor)} was asked about the same tokens and scores again and "
            "answered otherwise. Make it a function of each row of input_ids and scores, or decode with transformers",
        )

    def _require_a_choice(self, done: Tensor) -> None:
        broken = done.isnan().any() | (done == torch.inf).any() | (done == -torch.inf).all(-1).any()
        require(
            not bool(broken),
            f"logits processor {name_of(self.processor)} leaves scores that are nan or inf, or no token at all: there "
            "is nothing to choose by, and any token would come out. Let it leave some token a finite score",
        )
