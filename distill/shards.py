"""One shard on disk: some records laid end to end in a safetensors file, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from distill.sparse import pack_ids, unpack_ids
from distill.stores import Layout

SPLITS = ("train", "validation")
FINISH_REASONS = ("length", "eos", "stop", "corpus")
COLUMNS = ("prompt", "turn", "prompt_end")


@dataclass
class Record:
    """One sequence: what was read and written, which tokens are to be learned, and p of those."""

    ids: np.ndarray
    """(L,) int64 token ids, prompt and response."""
    loss_mask: np.ndarray
    """(L,) bool: the token is to be learned; never the first one, which nothing predicts."""
    meta: dict[str, Any]
    """document, prompt (its number in the run), turn, prompt_end (tokens), finish_reason, split."""
    payload: dict[str, np.ndarray] = field(default_factory=dict)
    """Arrays of the stores, one row per learned token, in order."""
    features: dict[str, np.ndarray] = field(default_factory=dict)
    """Arrays of the coded hidden states, one row per token, the prompt's too."""
    feature_errors: np.ndarray | None = None
    """(L, layers) squared relative error of each coded state, known where it was made."""


def shard_bytes(records: Sequence[Record], layout: Layout) -> bytes:
    """The content of a shard file, a pure function of its records."""
    documents = json.dumps([record.meta["document"] for record in records], ensure_ascii=False)
    arrays = {
        "ids": pack_ids(_joined([record.ids for record in records], (), np.dtype(np.int64)), layout.vocab_size),
        "loss_mask": _joined([record.loss_mask for record in records], (), np.dtype(np.uint8)),
        "token_start": _starts([len(record.ids) for record in records]),
        "row_start": _starts([int(record.loss_mask.sum()) for record in records]),
        "finish_reason": np.array([FINISH_REASONS.index(r.meta["finish_reason"]) for r in records], dtype=np.uint8),
        "split": np.array([SPLITS.index(record.meta["split"]) for record in records], dtype=np.uint8),
        "documents": np.frombuffer(documents.encode(), dtype=np.uint8),
    }
    arrays |= {name: np.array([record.meta[name] for record in records], dtype=np.int32) for name in COLUMNS}
    for store in layout.stores:
        for name, (shape, dtype) in store.shapes.items():
            arrays[name] = _joined([record.payload[name] for record in records], shape, dtype)
    for name, (shape, dtype) in layout.features.shapes.items() if layout.features else ():
        arrays[name] = _joined([record.features[name] for record in records], shape, dtype)
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def summary(content: bytes, records: Sequence[Record]) -> dict[str, Any]:
    """What the manifest says of a shard."""
    errors = [record.feature_errors for record in records if record.feature_errors is not None]
    return {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "records": len(records),
        "tokens": sum(len(record.ids) for record in records),
        "learned_tokens": int(sum(record.loss_mask.sum() for record in records)),
        "finish_reasons": dict(sorted(Counter(record.meta["finish_reason"] for record in records).items())),
        "feature_errors": np.concatenate(errors).sum(0, dtype=np.float64).tolist() if errors else [],
    }


class Shard:
    """A shard opened for reading; arrays are read from the file slice by slice."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path, self.layout = path, layout
        self.token_start = self._file.get_tensor("token_start")
        self.row_start = self._file.get_tensor("row_start")
        self.split = self._file.get_tensor("split")

    @cached_property
    def _file(self) -> Any:
        return safe_open(str(self.path), framework="np")

    @cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        return {name: self._file.get_tensor(name) for name in (*COLUMNS, "finish_reason")}

    @cached_property
    def documents(self) -> list[str]:
        """Id of the document of each record."""
        return json.loads(self._file.get_tensor("documents").tobytes().decode())

    @property
    def lengths(self) -> np.ndarray:
        """(records,) tokens of each record."""
        return np.diff(self.token_start)

    @property
    def prompts(self) -> np.ndarray:
        """(records,) number of the prompt of each record."""
        return self._columns["prompt"]

    def read(self, index: int, stores: Sequence[str] | None = None, layers: Sequence[int] | None = None) -> Record:
        """The record at `index` of this shard, with some of its stores and layers; None is all there are."""
        stores = self.layout.store if stores is None else stores
        features = self.layout.features
        kept = () if features is None else features.names_of(features.layers if layers is None else layers)
        tokens = slice(int(self.token_start[index]), int(self.token_start[index + 1]))
        rows = slice(int(self.row_start[index]), int(self.row_start[index + 1]))
        names = [name for store in stores for name in self.layout.store_named(store).shapes]
        return Record(
            ids=unpack_ids(self._slice("ids", tokens)),
            loss_mask=self._slice("loss_mask", tokens).astype(bool),
            meta=self._meta(index),
            payload={name: self._slice(name, rows) for name in names},
            features={name: self._slice(name, tokens) for name in kept},
        )

    def _slice(self, name: str, part: slice) -> np.ndarray:
        if part.start == part.stop:  # safetensors refuses such a part where it lies behind the last row
            return self._file.get_tensor(name)[:0]
        return self._file.get_slice(name)[part]

    def _meta(self, index: int) -> dict[str, Any]:
        meta: dict[str, Any] = {name: int(self._columns[name][index]) for name in COLUMNS}
        meta["document"] = self.documents[index]
        meta["finish_reason"] = FINISH_REASONS[self._columns["finish_reason"][index]]
        meta["split"] = SPLITS[self.split[index]]
        return meta


def _joined(parts: list[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    # The empty first part serves shards without records, where every conversation was too long.
    return np.concatenate([np.empty((0, *shape), dtype), *parts]).astype(dtype, copy=False)


def _starts(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
