"""What passes tell of finished sequences: p of learned tokens, a chunk of rows of logits at a time, and the hidden
states of all. The passes are those that wrote a text, or teacher-forced ones over it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from distill.corpora.corpus import unit_hash
from distill.records.distribution_stores import Arrays, Layout
from distill.records.feature_codes import FeatureCode
from distill.records.record_shards import Record
from distill.target_passes import STATE_ENTRIES, Pass, Passes, check_finite

CHUNK_ENTRIES = 1 << 23  # rows * vocabulary held at once: 32 MiB in float32, four times over while a tail is drawn
ERRORS = "errors"  # what the errors of coded states are called, as long as they travel with them


class Scorer:
    """Fills in what `layout` keeps of the target's distributions and hidden states."""

    def __init__(self, passes: Passes, layout: Layout, seed: int, code: FeatureCode | None = None) -> None:
        """`passes` leave the layout's layers; `code` codes them, where it keeps some."""
        self.passes, self.layout, self.seed, self.code = passes, layout, seed, code
        self.stores = layout.stores
        self.chunk_rows = max(1, CHUNK_ENTRIES // layout.vocab_size)

    @torch.no_grad()
    def score(self, records: Sequence[Record]) -> None:
        """Set payload and features of each record that has neither; the same records give the same bits."""
        for one in self.passes.over([record for record in records if not (record.payload or record.features)]):
            self._keep(one)

    @torch.no_grad()
    def take(self, record: Record, states: Tensor) -> None:
        """Set them from the states (L, n, d) that its writing left, at `with_final` of the passes' layers."""
        self._keep(self.passes.of_states(record, states))

    def _keep(self, one: Pass) -> None:
        self._keep_distributions(one)
        if self.code is not None:
            self.code = self.code.to(self.passes.device)
            self._keep_features(one, self.code)

    def _keep_distributions(self, one: Pass) -> None:
        counts = [int(record.loss_mask.sum()) for record in one.records]
        places = [torch.from_numpy(np.flatnonzero(record.loss_mask)) - 1 for record in one.records]
        hidden = one.hidden
        rows = torch.cat([hidden[row, place.to(hidden.device)] for row, place in enumerate(places)])  # (R, d)
        uniforms = torch.cat([self._uniforms(record) for record in one.records])
        documents = [record.meta["document"] for record in one.records]
        arrays = _joined(self._chunks(rows, uniforms, np.repeat(documents, counts).tolist()))
        for record, payload in zip(one.records, _split(arrays, counts), strict=True):
            record.payload = payload

    def _keep_features(self, one: Pass, code: FeatureCode) -> None:
        states = torch.cat(one.states())  # (R, n, d)
        chunk_rows = max(1, STATE_ENTRIES // states[0].numel())
        arrays = _joined(_coded(code, chunk.to(self.passes.device)) for chunk in states.split(chunk_rows))
        lengths = [len(record.ids) for record in one.records]
        for record, features in zip(one.records, _split(arrays, lengths), strict=True):
            record.feature_errors = features.pop(ERRORS)
            record.features = features

    def _chunks(self, rows: Tensor, uniforms: Tensor, documents: list[str]) -> Iterator[Arrays]:
        needs_log_p = any(store.needs_log_p for store in self.stores)
        for start in range(0, max(1, len(rows)), self.chunk_rows):
            part = slice(start, start + self.chunk_rows)
            log_p = self.passes.head(rows[part]).float().log_softmax(-1) if needs_log_p else None
            told = rows[part] if log_p is None else log_p[:, :1].exp()  # a NaN among logits is one in every entry
            check_finite("predictions", told.isfinite().all(-1).tolist(), documents[part])
            yield {
                name: array
                for store in self.stores
                for name, array in store.encode(rows[part], log_p, uniforms[part]).items()
            }

    def _uniforms(self, record: Record) -> Tensor:
        """What the tail draws of a record are made from: its own stream, by prompt and turn."""
        key = unit_hash("tail", self.seed, record.meta["prompt"], record.meta["turn"])
        generator = torch.Generator().manual_seed(int(key * 2**53))
        return torch.rand(int(record.loss_mask.sum()), self.layout.tail, generator=generator, dtype=torch.float64)


def _coded(code: FeatureCode, states: Tensor) -> Arrays:
    coded = code.encode(states)
    return {name: array.cpu().numpy() for name, array in (coded | {ERRORS: code.squared_errors(states, coded)}).items()}


def _split(arrays: Arrays, lengths: Sequence[int]) -> Iterator[Arrays]:
    """The arrays of each of several records laid end to end."""
    ends = np.cumsum([0, *lengths])
    return ({name: array[a:b] for name, array in arrays.items()} for a, b in zip(ends, ends[1:], strict=False))


def _joined(chunks: Iterable[Arrays]) -> Arrays:
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for chunk in chunks:
        for name, array in chunk.items():
            parts[name].append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}
