"""The draft LM's passes over texts that are given anew in every round: what it has read of them before is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.drafters.drafting import Above
from decode.drafters.lm_steps import LMSteps, PassByPass
from decode.forward.kept.lease import Lease
from decode.forward.target import CachedModel, runner_for
from decode.models.compatibility import longest_context

WIDTHS = (2, 4, 8, 16, 32)
"""Tokens of a round's first pass: few, so that captures serve. Of texts that have more unread those before are read as
prompts are."""
Texts = Sequence[list[int] | None]
"""The tokens of each row, at least one; None of rows for which nothing is drafted."""


class Reader:
    """Steps over B rows of texts in one call. Keys and values are kept up to where a row's text differs from what was
    read there, its own draft of the round before among it."""

    def __init__(self, model: PreTrainedModel, size: int, capacity: int, lease: Lease) -> None:
        self._model, self._size, self._lease = model, size, lease
        self.longest = longest_context(model.config) or 1 << 30
        """Tokens up to which the draft knows contexts."""
        self._held: list[list[int]] = [[] for _ in range(size)]
        self._stepped: list[Tensor] = []
        self._drafted_for: list[bool] = [False] * size
        self._steps: LMSteps | None = None
        self._renew(capacity)

    def catch_up(self, texts: Texts, depth: int = 0, most: int = WIDTHS[-1]) -> None:
        """Read all but the last token of texts of which more than `most` are unread, with room for `depth` tokens
        behind them. Room comes first: a longer cache knows nothing of what was read."""
        self._note_steps()
        texts_or_held = (held if text is None else text for text, held in zip(texts, self._held, strict=True))
        self._hold(max(map(len, texts_or_held)) + depth)
        begin = [0 if text is None else self._read_of(row, text) for row, text in enumerate(texts)]
        end = [0 if text is None else len(text) - 1 for text in texts]
        end = [last if last - first >= most else 0 for first, last in zip(begin, end, strict=True)]
        if not any(end):
            return
        ids = [[] if text is None else text[:last] for text, last in zip(texts, end, strict=True)]
        self.runner.prefill(self._padded(ids, max(end)), begin, end)
        for row, last in enumerate(end):
            if last:
                self._held[row] = ids[row]

    def begin(self, texts: Texts, depth: int, width: int | None = None) -> None:
        """A round of so many tokens behind these texts; the others are read once more where they end, in vain. `width`
        is that of the first pass, else the least of `WIDTHS` that will do."""
        self.catch_up(texts, depth, WIDTHS[-1] if width is None else width)
        unread = [0 if text is None else len(text) - self._read_of(row, text) for row, text in enumerate(texts)]
        width = next(one for one in WIDTHS if one >= max(unread)) if width is None else width
        self._drafted_for = [text is not None for text in texts]
        self._held = [held if text is None else list(text) for text, held in zip(texts, self._held, strict=True)]
        lengths = [max(1, len(held)) for held in self._held]
        ends = torch.tensor(lengths, device=self.runner.device)[:, None]
        last = self._padded([held[max(0, len(held) - width) :] for held in self._held], width)
        self._steps = LMSteps(PassByPass(self.runner, ends, max(lengths)), last, ends)

    def first(self) -> Tensor:
        """(B, 1, V) behind the texts."""
        assert self._steps is not None
        return self._steps.first()

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        """(B, 1, V) at tokens (B, 1) of a chain."""
        assert self._steps is not None
        self._stepped.append(tokens)
        return self._steps.step(tokens, depth, above)

    def _read_of(self, row: int, text: list[int]) -> int:
        """Tokens of the text that need not be read again; the last one is, for what follows it."""
        held, same, most = self._held[row], 0, min(len(self._held[row]), len(text) - 1)
        while same < most:
            middle = (same + most + 1) // 2
            if held[same:middle] == text[same:middle]:
                same = middle
            else:
                most = middle - 1
        return same

    def _note_steps(self) -> None:
        """The drafts of the last round were read, too."""
        if self._stepped:
            for row, tokens in enumerate(torch.cat(self._stepped, 1).tolist()):
                if self._drafted_for[row]:
                    self._held[row] += tokens
        self._stepped = []

    def _hold(self, slots: int) -> None:
        """Make room for so many tokens a row, which nobody knows before the text is written."""
        if slots > self.runner.cache.capacity:
            self._renew(2 * slots)

    def _renew(self, capacity: int) -> None:
        self._held, self._stepped = [[] for _ in range(self._size)], []
        self.runner: CachedModel = runner_for(self._model, self._size, capacity, self._lease, "draft")

    def _padded(self, rows: Sequence[list[int]], width: int) -> Tensor:
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.runner.device)
