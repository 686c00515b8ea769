"""Teacher-forced passes over finished sequences, of similar lengths together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.common.environment import device_of
from decode.common.errors import RunError
from decode.models.hidden_states import FINAL, Taps
from decode.models.output_head import OutputHead, head_of
from decode.models.structure import decoder_of

if TYPE_CHECKING:
    from distill.records.record_shards import Record

STATE_ENTRIES = 1 << 25  # tokens * layers * channels worked on at once: 128 MiB in float32, a few times over


MOST_TOKENS = 1 << 16
"""Of all rows of a pass over finished texts, padding included. Keys and values of the rows that write lie beside
it: with those of an 8B target, 128 rows of 2,048 tokens would not fit into 80 GB."""


def with_final(layers: Sequence[int]) -> tuple[int, ...]:
    """`layers`, and the final states that p is made from."""
    return tuple(dict.fromkeys((*layers, FINAL)))


@dataclass(frozen=True)
class Pass:
    """What one forward gave, on the head's device or the CPU."""

    records: list[Record]
    hidden: Tensor
    """(B, T, d) final hidden states."""
    read: Tensor | None
    """(B, T, n, d) hidden states of the n layers asked for, None for none."""

    def states(self) -> list[Tensor]:
        """(L, n, d) of each record; RunError where one is not finite: a code would carry it to all others."""
        assert self.read is not None
        found = [self.read[row, : len(record.ids)] for row, record in enumerate(self.records)]
        finite = [bool(state.isfinite().all()) for state in found]
        check_finite("hidden states", finite, [record.meta["document"] for record in self.records])
        return found


def check_finite(what: str, finite: Sequence[bool], documents: Sequence[str]) -> None:
    """RunError that names the documents of what is not."""
    broken = dict.fromkeys(name for name, good in zip(documents, finite, strict=True) if not good)
    if broken:
        raise RunError(
            f"the target's {what} are not finite in the texts of {', '.join([*broken][:5])}, so nothing can be learned "
            "from them. Give the target in a wider precision (target.dtype=float32), or leave those documents out"
        )


class Passes(ABC):
    """Passes of a target, which leave its hidden states at `layers`, and the head that makes logits of the final ones.
    What reads them does not know where the target runs."""

    layers: tuple[int, ...]
    batch_size: int
    head: OutputHead

    @property
    def device(self) -> torch.device:
        """Where the head lies, and so where work on states is done."""
        return device_of(self.head.model)  # type: ignore[return-value]

    @torch.no_grad()
    def over(self, records: Sequence[Record]) -> Iterator[Pass]:
        """All of `records`. Batches depend on the records alone, so the same records give the same bits."""
        batch: list[Record] = []
        for record in sorted(records, key=lambda record: len(record.ids)):
            if len(batch) == self.batch_size or (len(batch) + 1) * len(record.ids) > MOST_TOKENS:
                yield from [self.of_batch(batch)] if batch else []
                batch = []
            batch.append(record)
        if batch:
            yield self.of_batch(batch)

    def of_states(self, record: Record, states: Tensor) -> Pass:
        """What a text left as it was written: states (L, n, d) at `with_final` of the layers."""
        final = with_final(self.layers).index(FINAL)
        return Pass([record], states[None, :, final], states[None, :, : len(self.layers)] if self.layers else None)

    @abstractmethod
    def of_batch(self, batch: list[Record]) -> Pass:
        """One pass over these."""


class ModelPasses(Passes):
    """Those of a model in this process."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], batch_size: int) -> None:
        self.model, self.layers, self.batch_size = model, tuple(layers), batch_size
        self.reader, self.head, self.decoder = Taps(model, layers), head_of(model), decoder_of(model)

    def of_batch(self, batch: list[Record]) -> Pass:
        with self.reader:
            hidden = self._hidden(batch)
        return Pass(batch, hidden, self.reader.stacked() if self.layers else None)

    def _hidden(self, batch: list[Record]) -> Tensor:
        lengths = [len(record.ids) for record in batch]
        ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
        for row, record in enumerate(batch):
            ids[row, : len(record.ids)] = torch.from_numpy(record.ids)
        device = self.device
        mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
        padded = None if min(lengths) == max(lengths) else mask.to(device)  # without a mask the causal kernel is faster
        return self.decoder(input_ids=ids.to(device), attention_mask=padded, use_cache=False).last_hidden_state
