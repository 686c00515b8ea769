"""What a round knows of its rows, as tensors on the device, and how a verdict changes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from decode.verify.verdict import Verdict


class State(NamedTuple):
    """B rows of a call. A row that is `finished` stays as it is, whatever a round decides for it."""

    ids: Tensor
    """(B, capacity) int64 committed tokens, left-aligned; the last one of each row is `pending`."""
    lengths: Tensor
    """(B,) int64 committed tokens, pending included."""
    ends: Tensor
    """(B,) int64 tokens at which each row ends by length."""
    finished: Tensor
    """(B,) bool: ended by length or by a token of `end_ids`."""
    keys: Tensor
    """(B,) int64 `noise.row_keys` of the requests in the rows."""
    round_index: Tensor
    """() int64: number of the coming round, from 0."""
    temperature: Tensor
    """(1,) fp64; 0 is greedy."""
    end_ids: Tensor
    """(E,) int64 tokens that end a text."""
    passenger_logits: Tensor
    """(B, P, V) as in `Context`; P is 0 where trees have no passengers."""
    passenger_positions: Tensor
    """(B, P) int64 as in `Context`."""

    @property
    def starts(self) -> Tensor:  # (B, 1)
        """Tokens in the target's cache: all but pending."""
        return self.lengths[:, None] - 1

    def positions(self, depth: int) -> Tensor:  # (B, depth + 1)
        """Of the token after pending, of the one after that, ..."""
        return self.lengths[:, None] + torch.arange(depth + 1, device=self.lengths.device)

    @classmethod
    def of(cls, size: int, capacity: int, temperature: float, end_ids: Iterable[int], device: torch.device) -> State:
        """That of `size` empty rows, before the first round."""
        none = torch.zeros(size, dtype=torch.long, device=device)
        return cls(
            ids=torch.zeros(size, capacity, dtype=torch.long, device=device),
            lengths=none,
            ends=none.clone(),
            finished=none.bool(),
            keys=none.clone(),
            round_index=torch.zeros((), dtype=torch.long, device=device),
            temperature=torch.tensor([temperature], dtype=torch.float64, device=device),
            end_ids=torch.tensor(sorted(end_ids), dtype=torch.long, device=device),
            passenger_logits=torch.zeros(size, 0, 0, device=device),
            passenger_positions=none[:, None].expand(-1, 0),
        )

    def listening(self, passengers: int, vocab_size: int, dtype: torch.dtype) -> State:
        """With room for what so many passengers hear."""
        shape = (len(self.ids), passengers)
        return self._replace(
            passenger_logits=torch.zeros(*shape, vocab_size, dtype=dtype, device=self.ids.device),
            passenger_positions=torch.full(shape, -1, device=self.ids.device),
        )

    def seat(self, rows: list[int], prompts: list[list[int]], ends: list[int], keys: Tensor) -> None:
        """Begin rows anew with requests: their prompts, the tokens at which they end, and (n,) what keys their noise.
        Together, since each row alone is six uploads."""
        lengths, device = [len(prompt) for prompt in prompts], self.ids.device
        padded = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts]
        at, committed, last = (torch.tensor(values, device=device) for values in (rows, lengths, ends))
        self.ids[at, : max(lengths)] = torch.tensor(padded, device=device)
        self.lengths[at], self.ends[at], self.finished[at], self.keys[at] = committed, last, False, keys
        self.passenger_positions[at] = -1

    def stop(self, row: int, length: int) -> None:
        """End a row at so many tokens for a reason that the device does not know of: it would run on to its length, and
        past the slots that passes look at."""
        self.lengths[row], self.finished[row] = length, True

    def after(self, verdict: Verdict) -> State:
        """The state of the next round: rows grow by the tokens of the verdict up to the end of the text or of the room.
        What lies behind in `ids` is written over later."""
        tokens, accepted = verdict.tokens, verdict.num_accepted
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        ends_here = (tokens[..., None] == self.end_ids).any(-1) & (steps <= accepted[:, None])
        first_end = torch.where(ends_here, steps, tokens.shape[1]).amin(-1)
        counts = torch.minimum(torch.minimum(accepted, first_end) + 1, self.ends - self.lengths)
        counts = torch.where(self.finished, 0, counts)
        lengths = self.lengths + counts
        places = (self.lengths[:, None] + steps).clamp(max=self.ids.shape[1] - 1)
        return self._replace(
            ids=self.ids.scatter(1, places, tokens),
            lengths=lengths,
            finished=self.finished | (first_end < counts) | (lengths >= self.ends),
            round_index=self.round_index + 1,
        )

    def moved(self, vocab_size: int) -> State:
        """Another state of the same shapes, whose rows are a token longer: where a captured round has baked a value in,
        it decides otherwise here than the round itself does."""
        return self._replace(
            ids=(self.ids + 1) % vocab_size,
            lengths=self.lengths + 1,
            ends=self.ends + 2,
            keys=self.keys + 1,
            round_index=self.round_index + 1,
            passenger_logits=self.passenger_logits.flip(-1),
            passenger_positions=self.passenger_positions + 1,
        )
