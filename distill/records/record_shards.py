"""One shard on disk: some records laid end to end in a safetensors file, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any, get_args

import numpy as np
from safetensors.numpy import save

from decode.common.checked_json import JsonFile, Text
from decode.common.errors import InputError
from distill.records.distribution_stores import Layout
from distill.records.feature_codes import Shapes
from distill.records.file_checks import check_arrays, check_sum
from distill.records.head_tail import id_width, pack_ids, unpack_ids
from distill.records.record_manifest import REMEDY, FinishReason, ShardSummary
from distill.records.recorded_drafts import Drafting, RecordedDraft
from distill.records.safetensors_file import open_arrays

SPLITS = ("train", "validation")
FINISH_REASONS = get_args(FinishReason)
DOCUMENTS = JsonFile(list[Text], "a record would be taken for another document's", f"{REMEDY}.")
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
    passes: int | None = None
    """Target passes that its response took, known where it was written."""


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


def drafting_of(records: Iterable[Record], draft: RecordedDraft | None) -> Drafting | None:
    """That of one shard; None for texts that no draft was used for."""
    if draft is None:
        return None
    written = [(len(one.ids) - one.meta["prompt_end"], one.passes) for one in records if one.passes is not None]
    return Drafting(
        draft=draft, tokens=sum(tokens for tokens, _ in written), passes=sum(passes for _, passes in written)
    )


def array_shapes(layout: Layout, known: ShardSummary) -> Shapes:
    """Shape and dtype of every array of a shard; the names of its documents are of any length."""
    wide = () if id_width(layout.vocab_size) == 2 else (3,)
    tokens, starts, records = (known.tokens,), (known.records + 1,), (known.records,)
    shapes: Shapes = {
        "ids": ((*tokens, *wide), np.dtype(np.uint8 if wide else np.uint16)),
        "loss_mask": (tokens, np.dtype(np.uint8)),
        "token_start": (starts, np.dtype(np.int64)),
        "row_start": (starts, np.dtype(np.int64)),
        "finish_reason": (records, np.dtype(np.uint8)),
        "split": (records, np.dtype(np.uint8)),
        "documents": ((-1,), np.dtype(np.uint8)),
    } | {name: (records, np.dtype(np.int32)) for name in COLUMNS}
    for store in layout.stores:
        shapes |= {name: ((known.learned_tokens, *row), dtype) for name, (row, dtype) in store.shapes.items()}
    coded = layout.features.shapes if layout.features else {}
    return shapes | {name: ((known.tokens, *row), dtype) for name, (row, dtype) in coded.items()}


class Shard:
    """A shard opened for reading; arrays are read from the file slice by slice."""

    def __init__(self, path: Path, layout: Layout, known: ShardSummary) -> None:
        """Raises InputError where the file's arrays are not of the names, types and sizes that `layout` and `known`
        call for, or do not fit together."""
        self.path, self.layout, self.known = path, layout, known
        shapes = array_shapes(layout, known)
        self._file = open_arrays(path, shapes, REMEDY)
        self._require(known.arrays.keys() == shapes.keys(), f"the arrays {sorted(shapes)}")
        self.token_start = self._file.get_tensor("token_start")
        self.row_start = self._file.get_tensor("row_start")
        self.split = self._file.get_tensor("split")
        self._columns = {name: self._file.get_tensor(name) for name in (*COLUMNS, "finish_reason")}
        self._check_columns()
        self._unchecked, self._checking = set(shapes), RLock()  # several threads may read it

    @cached_property
    def documents(self) -> list[str]:
        """Id of the document of each record."""
        found = DOCUMENTS.parse(self._file.get_tensor("documents").tobytes(), f"{self.path}: documents")
        self._require(len(found) == self.known.records, f"{len(found)} names of documents")
        return found

    @cached_property
    def _chosen(self) -> set[str]:
        """Arrays that are read where they are asked for: of stores and hidden states."""
        kept = [*self.layout.stores, *([self.layout.features] if self.layout.features else [])]
        return {name for one in kept for name in one.shapes}

    def check_content(self) -> None:
        """Raise InputError where the bytes are not those that were written, or their tokens cannot be. Reads the whole
        file, and holds the checksums of its arrays against it too: a wrong one would refuse a sound shard later on."""
        check_sum(self.path, self.known)
        check_arrays(self.path, self.known.arrays)
        self._check_tokens()
        self._unchecked.clear()

    def _check_arrays(self, names: Collection[str]) -> None:
        """The same of these arrays, and of those that say where a record lies, each once."""
        with self._checking:
            wanted = {name for name in self._unchecked if name in names or name not in self._chosen}
            if not wanted:
                return
            check_arrays(self.path, {name: self.known.arrays[name] for name in sorted(wanted)})
            if "ids" in wanted:
                self._check_tokens()
            self._unchecked -= wanted

    def _check_tokens(self) -> None:
        """Refuse ids outside of the vocabulary, and tokens that are marked as learned where no row of p says so."""
        ids, mask = unpack_ids(self._file.get_tensor("ids")), self._file.get_tensor("loss_mask").astype(bool)
        self._require(ids.max(initial=0) < self.layout.vocab_size, f"the token id {ids.max(initial=0)}")
        learned = np.concatenate([[0], np.cumsum(mask)])
        self._require((learned[self.token_start] == self.row_start).all(), "learned tokens that have no row of p")
        first = self.token_start[:-1][self.lengths > 0]
        self._require(not mask[first].any(), "a first token that is to be learned, which nothing predicts")
        assert self.documents is not None

    def _check_columns(self) -> None:
        known, prompt_end = self.known, self._columns["prompt_end"]
        for starts, total in ((self.token_start, known.tokens), (self.row_start, known.learned_tokens)):
            self._require(starts[0] == 0 and starts[-1] == total, f"parts from {starts[0]} to {starts[-1]} of {total}")
            self._require((np.diff(starts) >= 0).all(), "a record that ends before it begins")
        self._require((self.split < len(SPLITS)).all(), f"splits other than {SPLITS}")
        self._require((self._columns["finish_reason"] < len(FINISH_REASONS)).all(), f"ends other than {FINISH_REASONS}")
        ended = Counter(FINISH_REASONS[code] for code in self._columns["finish_reason"])
        self._require(ended == Counter(known.finish_reasons), f"the finish_reasons {dict(ended)}")
        self._require(((prompt_end >= 0) & (prompt_end <= self.lengths)).all(), "a prompt longer than its record")
        self._require((np.diff(self.prompts, prepend=0) >= 0).all(), "prompts that do not rise")
        self._require((self._columns["turn"] >= 0).all(), "a negative turn")
        layers = len(self.layout.features.layers) if self.layout.features and known.records else 0
        self._require(len(known.feature_errors) == layers, f"states of {layers} layers, not {known.feature_errors}")

    def _require(self, holds: bool | np.bool_, found: str) -> None:
        if not holds:
            raise InputError(
                f"{self.path} holds {found}, and its summary says {self.known.records} records, {self.known.tokens} "
                f"tokens of {self.layout.vocab_size}, {self.known.learned_tokens} of them learned, ended by "
                f"{self.known.finish_reasons}. {REMEDY}"
            )

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
        self._check_arrays([*names, *kept])
        payload = {name: self._slice(name, rows) for name in names}
        for name in names:
            if name.endswith(".ids"):
                found = unpack_ids(payload[name]).max(initial=0)
                self._require(found < self.layout.vocab_size, f"the token id {found} in {name}")
        return Record(
            ids=unpack_ids(self._slice("ids", tokens)),
            loss_mask=self._slice("loss_mask", tokens).astype(bool),
            meta=self._meta(index),
            payload=payload,
            features={name: self._slice(name, tokens) for name in kept},
        )

    def learned_ids(self, records: np.ndarray, most: int) -> np.ndarray:  # (n,) -> (tokens,) int64
        """Of the records of these numbers the tokens that are learned, of the first `most` of each, end to end."""
        self._check_arrays(())
        ids, mask = unpack_ids(self._file.get_tensor("ids")), self._file.get_tensor("loss_mask").astype(bool)
        wanted = np.isin(np.arange(len(self.lengths)), records)
        place = np.arange(len(ids)) - np.repeat(self.token_start[:-1], self.lengths)
        return ids[mask & np.repeat(wanted, self.lengths) & (place < most)]

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
