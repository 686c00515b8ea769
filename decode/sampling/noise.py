"""Counter-based randomness: every number is a pure function of (seed, row, position, stream, round, draw).

The coupled stream is keyed (seed, row, position) and may be read any number of times: draft and verdict share it by
rule, and the text does not depend on how requests are batched. Every other stream adds (round, draw) and must never
be read twice: Sequoia reuses its draft noise in every round, which leaves each token's distribution exact and that of
two tokens wrong by TV 0.54. With `audit=True` a ledger raises on the second reading.

Integers are mixed by SplitMix64 (Steele, Lea and Flood 2014), the same on every device.
"""

from __future__ import annotations

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


class Noise:
    """The randomness of one generation call: `rows` are the requests' own indices, never their slots in the batch."""

    def __init__(self, seed: int, rows: list[int], vocab_size: int, device: torch.device, audit: bool = False) -> None:
        self.device = device
        self._table = _signed_arange(vocab_size, device)
        self._seed = _mix(seed)
        self._row_keys = [_mix(self._seed + row) for row in rows]
        self._ledger: set[tuple[int, ...]] | None = set() if audit else None

    def seat(self, slot: int, row: int) -> None:
        """Slot `slot` of the batch now holds the request `row`."""
        self._row_keys[slot] = _mix(self._seed + row)

    def coupled(self, positions: Tensor | list[list[int]]) -> Tensor:  # (B, D) -> (B, D, V)
        """Standard Gumbel noise of the tokens at these absolute positions; may be read again."""
        keys = [
            [_mix(_mix(key + Stream.COUPLED) + position) for position in row]
            for key, row in zip(self._row_keys, _as_lists(positions), strict=True)
        ]
        return self._gumbel(keys)

    def fresh_gumbel(  # (B, D) -> (B, D, V)
        self, stream: Stream, positions: list[list[int]], round_index: int, draws: list[int] | None = None
    ) -> Tensor:
        """Gumbel noise that is read once: keyed by position, round, and (D,) `draws` that tell the nodes of a tree
        apart."""
        return self._gumbel(self._fresh_keys(stream, positions, round_index, draws))

    def fresh_uniform(  # (B, D) -> (B, D)
        self, stream: Stream, positions: list[list[int]], round_index: int, draws: list[int] | None = None
    ) -> Tensor:
        """Uniforms in (0, 1), fp64, read once."""
        keys = self._fresh_keys(stream, positions, round_index, draws)
        values = [[((key >> 11) + 0.5) * 2.0**-53 for key in row] for row in keys]
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    def _fresh_keys(
        self, stream: Stream, positions: list[list[int]], round_index: int, draws: list[int] | None = None
    ) -> list[list[int]]:
        assert stream is not Stream.COUPLED
        draws = draws if draws is not None else [0] * len(positions[0])
        if self._ledger is not None:
            self._enter(stream, positions, round_index, draws)
        return [
            [_mix(_mix(_mix(_mix(key + stream) + at) + round_index) + n) for at, n in zip(row, draws, strict=True)]
            for key, row in zip(self._row_keys, positions, strict=True)
        ]

    def _enter(self, stream: Stream, positions: list[list[int]], round_index: int, draws: list[int]) -> None:
        assert self._ledger is not None
        for key, row in zip(self._row_keys, positions, strict=True):
            for position, draw in zip(row, draws, strict=True):
                entry = (int(stream), key, position, round_index, draw)
                assert entry not in self._ledger, f"{entry} (stream, row key, position, round, draw) is read twice"
                self._ledger.add(entry)

    def _gumbel(self, keys: list[list[int]]) -> Tensor:
        """-log(E) with E = -log(1 - u) exponential. u has 32 bits; float32 keeps the fine end near u = 0, where the
        winners are, and u never rounds to 1, which would forbid a token for good."""
        key = torch.tensor([[_signed(k) for k in row] for row in keys], dtype=torch.int64, device=self.device)
        bits = _mix_(key[..., None] + self._table)
        bits.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)
        uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
        return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(value: int) -> int:
    """SplitMix64 of a Python integer."""
    value = (value + GOLDEN) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * MIX1) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * MIX2) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def _mix_(value: Tensor) -> Tensor:
    """SplitMix64's finaliser in place; int64 arithmetic wraps, and a masked shift is the logical one."""
    for shift, factor in ((30, MIX1), (27, MIX2)):
        value.bitwise_xor_((value >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return value.bitwise_xor_((value >> 31).bitwise_and_((1 << 33) - 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _signed_arange(size: int, device: torch.device) -> Tensor:
    return torch.arange(1, size + 1, dtype=torch.int64, device=device) * _signed(GOLDEN)


def _as_lists(positions: Tensor | list[list[int]]) -> list[list[int]]:
    return positions.tolist() if isinstance(positions, Tensor) else positions
