"""Packed batches out of a sequence source, read ahead in threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from decode.drafters.base import Batch
from distill.sequences import RecordSequences, SequenceSource
from train.packing import Order, Row, pack, share

READERS = {"cuda": 4}
"""Steps of records that are read at once, each in a thread, by the device that trains; others have no core to spare. A
row of 4,096 tokens took a thread 0.06 s (states in bfloat16), 0.74 (int8) or 1.8 (pca); a GPU takes 0.6 by estimate."""
PADDING = -1
"""The row number of an empty row, which fills up a batch."""


@dataclass(frozen=True)
class PackedSource:
    """A sequence source with the rows that its sequences are packed into."""

    source: SequenceSource
    rows: list[Row]
    length: int
    """Tokens per row T."""
    layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states a batch brings along, where the source knows them."""

    @classmethod
    def of(cls, source: SequenceSource, length: int, seed: int, layers: tuple[int, ...] = ()) -> PackedSource:
        """All sequences of `source`, packed into rows of `length` tokens."""
        return cls(source, pack(source.lengths.tolist(), length, seed), length, layers)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, padding not counted."""
        return int(sum(self.source.lengths))

    def sample(self, most: int) -> list[int]:
        """Numbers of at most so many rows, the same ones every time."""
        return Order(len(self.rows), min(len(self.rows), most), seed=0).rows_of_step(0)

    def teaches(self, row_numbers: Iterable[int]) -> bool:
        """Whether any token of these rows is to be learned."""
        return any(self.source[index].loss_mask.any() for number in row_numbers for index in self.rows[number])

    def batch(self, row_numbers: Sequence[int], head: Any = None) -> Batch:
        """These rows as a Batch of shape (len(row_numbers), T) on the CPU; PADDING gives an empty row.

        `head` turns recorded hidden states into p, where the records hold those.
        """
        shape = (len(row_numbers), self.length)
        ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        document, loss_mask = torch.full(shape, -1), torch.zeros(shape, dtype=torch.bool)
        placed = []
        for b, number in enumerate(row_numbers):
            start = 0
            for place, index in enumerate(() if number == PADDING else self.rows[number]):
                sequence = self.source[index]
                span = slice(start, start + len(sequence.ids))
                ids[b, span] = torch.as_tensor(sequence.ids, dtype=torch.long)
                loss_mask[b, span] = torch.as_tensor(sequence.loss_mask, dtype=torch.bool)
                positions[b, span] = torch.arange(len(sequence.ids))
                document[b, span] = place
                placed.append((sequence, b, start))
                start = span.stop
        target = self.source.collate(placed, shape, torch.device("cpu"), head)
        features = self.source.features(placed, shape, self.layers)
        return Batch(ids, positions, document, loss_mask, features=features, target=target)


def readers_of(source: SequenceSource, device_type: str) -> int:
    """Threads that may read `source` at once: several of records. Text is quickly read, and a server is asked for one
    batch after another."""
    return READERS.get(device_type, 1) if isinstance(source, RecordSequences) else 1


class StepReader:
    """The micro-batches of one rank, step by step, the next ones being read while this one is computed."""

    def __init__(
        self,
        packed: PackedSource,
        order: Order,
        split: tuple[int, int, int, int],
        head: Any = None,
        readers: int = 1,
        is_pinned: bool = False,
    ) -> None:
        """`split` is (rank, world size, micro-steps, rows per micro-step); `readers` steps are read at once, and lie in
        memory that a GPU copies from by itself if `is_pinned`."""
        self.packed, self.order, self.split, self.head, self.readers = packed, order, split, head, readers
        self.is_pinned = is_pinned
        self.wait_s = 0.0
        """Seconds for which `steps` has kept its caller waiting."""

    def rows_of(self, step: int, rank: int) -> list[list[int]]:
        """Row numbers of a rank's micro-steps."""
        _, world_size, micro_steps, batch_size = self.split
        rows = self.order.rows_of_step(step)
        return [share(rows, rank, micro, batch_size, world_size) for micro in range(micro_steps)]

    def documents_of(self, step: int, rank: int) -> list[str]:
        """Names of the documents that a rank reads in a step, for messages."""
        numbers = [number for micro in self.rows_of(step, rank) for number in micro]
        return [self.packed.source[index].document for number in numbers for index in self.packed.rows[number]]

    def steps(self, first: int, last: int) -> Iterator[list[Batch]]:
        """The micro-batches of steps first .. last - 1."""
        todo = iter(range(first, last))
        with ThreadPoolExecutor(self.readers, "batches") as pool:
            ahead = deque(pool.submit(self._read, step) for step in islice(todo, self.readers))
            while ahead:
                start = time.perf_counter()
                batches = ahead.popleft().result()
                self.wait_s += time.perf_counter() - start
                ahead.extend(pool.submit(self._read, step) for step in islice(todo, 1))
                yield batches

    def _read(self, step: int) -> list[Batch]:
        batches = [self.packed.batch(rows, self.head) for rows in self.rows_of(step, self.split[0])]
        return [batch.pinned() for batch in batches] if self.is_pinned else batches
