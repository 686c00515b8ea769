"""Counter-based randomness: every number is a pure function of (seed, row, position, stream, round, draw).

The coupled stream is keyed (seed, row, position) and may be read any number of times: draft and verdict share it by
rule, and the text does not depend on how requests are batched. Every other stream adds (round, draw) and must never
be read twice: Sequoia reuses its draft noise in every round, which leaves each token's distribution exact and that of
two tokens wrong by TV 0.54. With a `Ledger` the second reading raises.

Integers are mixed by SplitMix64 (Steele, Lea and Flood 2014), the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX1, MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Stream(IntEnum):
    """What a random number is for; streams never share numbers."""

    COUPLED = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4
    AHEAD = 5


@dataclass(frozen=True)
class Ledger:
    """Every number outside the coupled stream that was read so far; looking at it waits for the device."""

    read: set[tuple[int, ...]] = field(default_factory=set)

    def enter(self, stream: Stream, keys: Tensor, positions: Tensor, round_index: int, draws: Tensor) -> None:
        """keys (B,), positions (B, D), draws (D,)."""
        for key, row in zip(keys.tolist(), positions.tolist(), strict=True):
            for position, draw in zip(row, draws.tolist(), strict=True):
                entry = (int(stream), key, position, round_index, draw)
                assert entry not in self.read, f"{entry} (stream, row key, position, round, draw) is read twice"
                self.read.add(entry)


@dataclass(frozen=True)
class Noise:
    """The randomness of one round, made of tensors alone: nothing is uploaded or read."""

    keys: Tensor
    """(B,) int64 `row_keys`: of the requests' own indices, never of their slots in the batch."""
    table: Tensor
    """(V,) int64 `token_table`."""
    round_index: Tensor
    """() int64: number of this round, from 0."""
    ledger: Ledger | None = None

    @classmethod
    def of(cls, seed: int, rows: list[int], vocab_size: int, device: torch.device, round_index: int = 0) -> Noise:
        """That of these requests in one round."""
        index = torch.full((), round_index, dtype=torch.long, device=device)
        return cls(row_keys(seed, rows, device), token_table(vocab_size, device), index)

    def coupled(self, positions: Tensor) -> Tensor:  # (B, D) -> (B, D, V)
        """Standard Gumbel noise of the tokens at these absolute positions; may be read again."""
        return self._gumbel(_mixed(_mixed(self.keys + int(Stream.COUPLED))[:, None] + positions))

    def fresh_gumbel(  # (B, D) -> (B, D, V)
        self, stream: Stream, positions: Tensor, draws: Tensor | None = None
    ) -> Tensor:
        """Gumbel noise that is read once: keyed by position, round, and (D,) `draws` that tell the nodes of a tree
        apart."""
        return self._gumbel(self._fresh_keys(stream, positions, draws))

    def fresh_uniform(  # (B, D) -> (B, D)
        self, stream: Stream, positions: Tensor, draws: Tensor | None = None
    ) -> Tensor:
        """Uniforms in (0, 1), fp64, read once."""
        keys = self._fresh_keys(stream, positions, draws)
        return ((keys >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)

    def _fresh_keys(self, stream: Stream, positions: Tensor, draws: Tensor | None = None) -> Tensor:
        assert stream is not Stream.COUPLED
        draws = draws if draws is not None else torch.zeros_like(positions[0])
        if self.ledger is not None:
            self.ledger.enter(stream, self.keys, positions, int(self.round_index), draws)
        at = _mixed(_mixed(self.keys + int(stream))[:, None] + positions)
        return _mixed(_mixed(at + self.round_index) + draws)

    def _gumbel(self, keys: Tensor) -> Tensor:
        """-log(E) with E = -log(1 - u) exponential. u has 32 bits; float32 keeps the fine end near u = 0, where the
        winners are, and u never rounds to 1, which would forbid a token for good."""
        bits = _mix_(keys[..., None] + self.table)
        bits.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)
        uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
        return uniform.neg_().log1p_().neg_().log_().neg_()


def row_keys(seed: int, rows: list[int], device: torch.device) -> Tensor:  # -> (B,) int64
    """What keys the noise of the requests with these indices."""
    begun = _mixed(torch.tensor(_signed(seed & 0xFFFFFFFFFFFFFFFF)))
    return _mixed(begun + torch.tensor(rows, dtype=torch.long)).to(device)


def token_table(vocab_size: int, device: torch.device) -> Tensor:  # -> (V,) int64
    """What is added to a key for each token."""
    return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _signed(GOLDEN)


def _mixed(value: Tensor) -> Tensor:
    """SplitMix64 of int64 numbers; its arithmetic wraps."""
    return _mix_(value + _signed(GOLDEN))


def _mix_(value: Tensor) -> Tensor:
    """SplitMix64's finaliser in place; a masked shift is the logical one. By `>>` one takes half as long again."""
    for shift, factor in ((30, MIX1), (27, MIX2)):
        value.bitwise_xor_(value.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return value.bitwise_xor_(value.bitwise_right_shift(31).bitwise_and_((1 << 33) - 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
