"""The kinds of store that keep p of a token: how each codes a chunk of rows, what it costs, how it is read back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from decode.common.checked_json import Size
from distill.objectives.target_distribution import FullRows, HiddenRows, SparseRows, TargetDistribution
from distill.records import head_tail as sparse
from distill.records.config import StoreName
from distill.records.feature_codes import FeatureLayout, Shapes

Arrays = dict[str, np.ndarray]
Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """What a record folder keeps of a token; part of its manifest."""

    store: list[StoreName]
    """[] keeps the text alone."""
    vocab_size: Size
    hidden_size: Size
    hidden_dtype: Annotated[str, Field(pattern="^(float32|bfloat16|float16)$")]
    head: Size
    tail: Size
    topk: Size
    features: FeatureLayout | None = None
    """Hidden states of every token; None keeps none."""

    @property
    def stores(self) -> list[Store]:
        """The stores, in the order asked for."""
        return [self.store_named(name) for name in self.store]

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk of one learned token: id, mask, hidden states and every store."""
        return self.unlearned_bytes_per_token + sum(store.bytes_per_token for store in self.stores)

    @property
    def unlearned_bytes_per_token(self) -> int:
        """Bytes on disk of a token that is not learned: id, mask and hidden states."""
        return self.text_bytes_per_token + self.feature_bytes_per_token

    @property
    def text_bytes_per_token(self) -> int:
        """Bytes on disk of id and mask."""
        return sparse.id_width(self.vocab_size) + 1

    @property
    def feature_bytes_per_token(self) -> int:
        """Bytes on disk of the hidden states of one token."""
        return 0 if self.features is None else self.features.bytes_per_token

    def store_named(self, name: str) -> Store:
        """One store of this layout."""
        if name == "full":
            return FullStore(self.vocab_size)
        if name == "last_hidden":
            return HiddenStore(self.hidden_size, self.hidden_dtype)
        head, tail = (self.head, self.tail) if name == "head_tail" else (self.topk, 0)
        return SparseStore(name, min(head, self.vocab_size), tail, self.vocab_size)


class Store(ABC):
    """One way to keep p; its arrays are named after it."""

    name: str
    needs_log_p: bool = True

    @property
    @abstractmethod
    def shapes(self) -> Shapes:
        """Shape of a row and dtype of each array."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk of one row."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.shapes.values())

    @abstractmethod
    def encode(self, hidden: Tensor, log_p: Tensor | None, uniforms: Tensor) -> Arrays:
        """Rows to arrays: hidden (R, d), log_p (R, V) float32 where `needs_log_p`, uniforms (R, tail) in [0, 1)."""

    @abstractmethod
    def distribution(
        self, arrays: Mapping[str, np.ndarray], row_index: Tensor, head: Head | None
    ) -> TargetDistribution:
        """The rows of `arrays` as a target distribution, on row_index's device."""


class SparseStore(Store):
    """head_tail, or topk where tail is 0; a top-k estimate is biased low and is never renormalised."""

    def __init__(self, name: str, head: int, tail: int, vocab_size: int) -> None:
        self.name, self.head, self.tail, self.vocab_size = name, head, tail, vocab_size

    @property
    def shapes(self) -> Shapes:
        entries = self.head + self.tail
        ids = (
            ((entries,), np.dtype(np.uint16))
            if sparse.id_width(self.vocab_size) == 2
            else ((entries, 3), np.dtype(np.uint8))
        )
        codes = 3 * ceil((entries + (self.tail > 0)) / 2)
        return {f"{self.name}.ids": ids, f"{self.name}.codes": ((codes,), np.dtype(np.uint8))}

    def encode(self, hidden: Tensor, log_p: Tensor | None, uniforms: Tensor) -> Arrays:
        assert log_p is not None
        return self._arrays(sparse.encode(log_p, self.head, uniforms.to(log_p.device) if self.tail else None))

    def of_likeliest(self, ids: Tensor, log_p: Tensor) -> Arrays:  # (R, head) each, by falling p
        """Rows whose likeliest tokens are told, with log p of each; for topk, which has no tail."""
        assert not self.tail
        return self._arrays(sparse.packed(ids, log_p, self.vocab_size))

    def _arrays(self, record: sparse.SparseRecord) -> Arrays:
        return {f"{self.name}.ids": record.ids, f"{self.name}.codes": record.codes}

    def distribution(self, arrays: Mapping[str, np.ndarray], row_index: Tensor, head: Head | None) -> SparseRows:
        record = sparse.SparseRecord(arrays[f"{self.name}.ids"], arrays[f"{self.name}.codes"])
        ids, log_p, weight = (part.to(row_index.device) for part in sparse.decode(record, self.head, self.tail))
        return SparseRows(ids, log_p, weight, row_index)


class FullStore(Store):
    """All of log p in float16: at log p = -10 that is 0.4 % of p, where bfloat16 would be 3 %."""

    name = "full"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @property
    def shapes(self) -> Shapes:
        return {"full.log_p": ((self.vocab_size,), np.dtype(np.float16))}

    def encode(self, hidden: Tensor, log_p: Tensor | None, uniforms: Tensor) -> Arrays:
        assert log_p is not None
        return {"full.log_p": log_p.clamp_min(-65504.0).half().cpu().numpy()}

    def distribution(self, arrays: Mapping[str, np.ndarray], row_index: Tensor, head: Head | None) -> FullRows:
        return FullRows(torch.from_numpy(arrays["full.log_p"]).to(row_index.device), row_index)


class HiddenStore(Store):
    """The target's final hidden state in the target's own precision: p through the frozen head, as exact as it was."""

    name = "last_hidden"
    needs_log_p = False

    def __init__(self, hidden_size: int, dtype: str) -> None:
        self.hidden_size, self.dtype = hidden_size, getattr(torch, dtype)
        self.bits = torch.int16 if self.dtype.itemsize == 2 else torch.int32  # numpy has no bfloat16: its bits are kept

    @property
    def shapes(self) -> Shapes:
        return {"last_hidden.bits": ((self.hidden_size,), np.dtype(f"i{self.dtype.itemsize}"))}

    def encode(self, hidden: Tensor, log_p: Tensor | None, uniforms: Tensor) -> Arrays:
        return {"last_hidden.bits": hidden.to(self.dtype).view(self.bits).cpu().numpy()}

    def distribution(self, arrays: Mapping[str, np.ndarray], row_index: Tensor, head: Head | None) -> HiddenRows:
        assert head is not None, "a last_hidden record is read through the target's head"
        bits = torch.from_numpy(arrays["last_hidden.bits"]).to(row_index.device)
        return HiddenRows(bits.view(self.dtype), head, row_index)
