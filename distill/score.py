"""p of finished sequences: one teacher-forced pass, logits only of learned tokens and a chunk of rows at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.head import head_of
from distill.corpora.base import unit_hash
from distill.shards import Record
from distill.stores import Arrays, Layout

CHUNK_ENTRIES = 1 << 23  # rows * vocabulary held at once: 32 MiB in float32, three times over while a tail is drawn


class Scorer:
    """Fills in what the stores of `layout` keep of the target's laws."""

    def __init__(self, model: PreTrainedModel, layout: Layout, seed: int, batch_size: int) -> None:
        self.model, self.layout, self.seed, self.batch_size = model, layout, seed, batch_size
        self.head = head_of(model)
        self.stores = layout.stores
        self.chunk_rows = max(1, CHUNK_ENTRIES // layout.vocab_size)

    @torch.no_grad()
    def score(self, records: Sequence[Record]) -> None:
        """Set the payload of each record. Batches hang on the records alone, so the same records give the same bits."""
        order = sorted(range(len(records)), key=lambda index: len(records[index].ids))
        for start in range(0, len(order), self.batch_size):
            self._score_batch([records[index] for index in order[start : start + self.batch_size]])

    def _score_batch(self, batch: list[Record]) -> None:
        hidden = self._hidden(batch)  # (B, T, d)
        counts = [int(record.loss_mask.sum()) for record in batch]
        places = [torch.from_numpy(np.flatnonzero(record.loss_mask)) - 1 for record in batch]
        rows = torch.cat([hidden[row, place.to(hidden.device)] for row, place in enumerate(places)])  # (R, d)
        uniforms = torch.cat([self._uniforms(record) for record in batch])
        arrays = _joined(self._chunks(rows, uniforms))
        ends = np.cumsum(counts)[:-1]
        for name, array in arrays.items():
            for record, part in zip(batch, np.split(array, ends), strict=True):
                record.payload[name] = part

    def _chunks(self, rows: Tensor, uniforms: Tensor) -> Iterator[Arrays]:
        needs_log_p = any(store.needs_log_p for store in self.stores)
        for start in range(0, max(1, len(rows)), self.chunk_rows):
            part = slice(start, start + self.chunk_rows)
            log_p = self.head(rows[part]).float().log_softmax(-1) if needs_log_p else None
            yield {
                name: array
                for store in self.stores
                for name, array in store.encode(rows[part], log_p, uniforms[part]).items()
            }

    def _hidden(self, batch: list[Record]) -> Tensor:
        lengths = [len(record.ids) for record in batch]
        ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
        for row, record in enumerate(batch):
            ids[row, : len(record.ids)] = torch.from_numpy(record.ids)
        device = self.model.device
        mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
        padded = None if min(lengths) == max(lengths) else mask.to(device)  # without a mask the causal kernel is faster
        return self.model.base_model(input_ids=ids.to(device), attention_mask=padded, use_cache=False).last_hidden_state

    def _uniforms(self, record: Record) -> Tensor:
        """What the tail draws of a record are made from: its own stream, by prompt and turn."""
        key = unit_hash("tail", self.seed, record.meta["prompt"], record.meta["turn"])
        generator = torch.Generator().manual_seed(int(key * 2**53))
        return torch.rand(int(record.loss_mask.sum()), self.layout.tail, generator=generator, dtype=torch.float64)


def _joined(chunks: Iterator[Arrays]) -> Arrays:
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for chunk in chunks:
        for name, array in chunk.items():
            parts[name].append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}
