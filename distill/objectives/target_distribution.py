"""What an objective sees of p: rows of a target distribution, dense or sparse, wherever they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dense:
    """All of p."""

    log_p: Tensor
    """(R, V) float32 log p."""


@dataclass(frozen=True)
class Sparse:
    """An estimate p_hat of p on S kept tokens; a token may stand twice, its weights add up."""

    ids: Tensor
    """(R, S) int64 token ids."""
    log_p: Tensor
    """(R, S) float32 exact log p of each."""
    weight: Tensor
    """(R, S) float32 p_hat; 0 is padding."""


Distribution = Dense | Sparse

FLOOR = -1e4  # stands for log 0: exp of it is 0, and 0 * FLOOR is 0 where 0 * -inf would be NaN


def picked(p: Distribution, index: Tensor) -> Distribution:
    """Some of its rows (N,)."""
    if isinstance(p, Dense):
        return Dense(p.log_p[index])
    return Sparse(p.ids[index], p.log_p[index], p.weight[index])


class TargetDistribution(ABC):
    """p of `num_rows` rows, of which some may not be stored; a chunk is made only when it is asked for."""

    is_dense: bool

    def __init__(self, row_index: Tensor) -> None:
        """`row_index` (num_rows,) int64: where each row is stored, -1 where it is not."""
        self.row_index = row_index

    @property
    def num_rows(self) -> int:
        """Rows that can be asked for, stored or not."""
        return len(self.row_index)

    def has(self, rows: Tensor) -> Tensor:  # (...) -> (...) bool
        """Which of these rows are stored."""
        return (self.row_index[rows.to(self.row_index.device)] >= 0).to(rows.device)

    def chunk(self, rows: Tensor) -> Dense | Sparse:  # (R,)
        """p of these rows, which must be stored, on their device."""
        stored = self.row_index[rows.to(self.row_index.device)]
        assert not len(stored) or int(stored.min()) >= 0, "a row without a record was asked for"
        return self._read(stored, rows.device)

    @abstractmethod
    def _read(self, stored: Tensor, device: torch.device) -> Dense | Sparse:
        """The stored rows, moved to `device`."""


class SparseRows(TargetDistribution):
    """Sparse rows from a head_tail or topk record."""

    is_dense = False

    def __init__(self, ids: Tensor, log_p: Tensor, weight: Tensor, row_index: Tensor) -> None:  # three (N, S)
        super().__init__(row_index)
        self.ids, self.log_p, self.weight = ids, log_p, weight

    def _read(self, stored: Tensor, device: torch.device) -> Sparse:
        return Sparse(*(values[stored].to(device) for values in (self.ids, self.log_p, self.weight)))


class FullRows(TargetDistribution):
    """Whole rows of log p, kept in half precision."""

    is_dense = True

    def __init__(self, log_p: Tensor, row_index: Tensor) -> None:  # (N, V)
        super().__init__(row_index)
        self.log_p = log_p

    def _read(self, stored: Tensor, device: torch.device) -> Dense:
        return Dense(self.log_p[stored].to(device).float().log_softmax(-1))  # halves do not sum to 1


class HiddenRows(TargetDistribution):
    """Final hidden states, from a record or a live target, turned into p through the target's frozen head."""

    is_dense = True

    def __init__(
        self, hidden: Tensor, head: Callable[[Tensor], Tensor], row_index: Tensor, temperature: float = 1.0
    ) -> None:  # (N, d)
        super().__init__(row_index)
        self.hidden, self.head, self.temperature = hidden, head, temperature

    def _read(self, stored: Tensor, device: torch.device) -> Dense:
        # Without autocast: p is what the target's own precision gives, not what the draft is trained in.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            logits = self.head(self.hidden[stored]).to(device)
            logits = logits if self.temperature == 1 else logits.float() / self.temperature
            return Dense(logits.log_softmax(-1, torch.float32))
