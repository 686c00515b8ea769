"""Packed rows keep documents apart, and reading ahead changes nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode.drafters.lm import LMDraft
from decode.models.compatibility import load_tokenizer
from distill.config import ObjectiveConfig
from distill.corpora import load_corpus
from distill.records.record_folder import RecordFolder
from distill.sequences import TextSequences, TrainSequence, record_sequences, text_sequences
from tests.tiny import tiny_llama
from tests.train.clock import Clock
from tests.train.small_loop import one_text_a_row
from tests.train.toy import model_config, text_data
from train.batches import PADDING, PackedSource, StepReader
from train.loss import DraftLoss
from train.packing import Order


@pytest.fixture(scope="module")
def text(corpus: Path, target: Path) -> PackedSource:
    tokenizer = load_tokenizer(model_config(target))
    return PackedSource.of(text_sequences(load_corpus(text_data(corpus)), tokenizer, "train", 50), 64, seed=0)


def test_a_row_is_its_sequences_one_after_another(text: PackedSource) -> None:
    number = next(number for number, row in enumerate(text.rows) if len(row) > 1)
    batch = text.batch([number, PADDING])
    start = 0
    for place, index in enumerate(text.rows[number]):
        ids = torch.as_tensor(text.source[index].ids)
        span = slice(start, start := start + len(ids))
        assert torch.equal(batch.ids[0, span], ids)
        assert batch.positions[0, span].tolist() == list(range(len(ids)))
        assert (batch.document[0, span] == place).all()
    assert (batch.document[0, start:] == -1).all()
    assert (batch.document[1] == -1).all()
    assert not batch.loss_mask[1].any()


def test_packing_changes_no_loss(records: Path) -> None:
    """Documents of one row neither see each other nor predict each other's first token."""
    source = record_sequences(RecordFolder.open(records), "train", 64)
    module = DraftLoss(LMDraft(tiny_llama(300).double()), ObjectiveConfig(chunk_rows=7), window=2)
    packed = PackedSource.of(source, 64, seed=0)
    assert max(map(len, packed.rows)) > 1
    alone = PackedSource(source, [(index,) for index in range(len(source))], 64)
    sums = [module(one.batch(range(len(one.rows))))[1] for one in (packed, alone)]
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-6, atol=1e-6)


def test_reading_ahead_gives_the_batches_of_the_steps(text: PackedSource) -> None:
    order = Order(len(text.rows), 4, seed=3)
    reader = StepReader(text, order, split=(1, 2, 1, 2))
    for step, batches in enumerate(reader.steps(2, 5), start=2):
        wanted = text.batch(order.rows_of_step(step)[2:])
        assert torch.equal(batches[0].ids, wanted.ids)
    assert list(reader.steps(5, 5)) == []


class Told(TextSequences):
    """Says what it was asked for."""

    def collate(self, items: Any, shape: Any, device: Any, head: Any = None) -> Any:
        """Where each text was placed."""
        return [(sequence.document, row, start) for sequence, row, start in items], shape, head

    def features(self, items: Any, shape: Any, taps: Any) -> Any:
        """The taps."""
        return taps


def told() -> Told:
    """Texts of 3, 2 and 4 tokens; of the first one the last two are learned, of the others all but the first."""
    texts = [([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1]), ([1, 2, 3, 4], [0, 0, 1, 1])]
    return Told([TrainSequence(np.array(i), np.array(m, bool), document=f"doc{n}") for n, (i, m) in enumerate(texts)])


def test_a_batch_token_by_token() -> None:
    """Texts side by side in one row, each with positions, number and learned tokens of its own, then padding."""
    packed = PackedSource(told(), [(1, 0), (2,)], 7, layers=(2, -1))
    assert packed.num_tokens == 9
    batch = packed.batch([0, PADDING, 1], head="the head")
    assert batch.ids.tolist() == [[8, 9, 5, 6, 7, 0, 0], [0] * 7, [1, 2, 3, 4, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0, 0], [0] * 7, [0, 1, 2, 3, 0, 0, 0]]
    assert batch.document.tolist() == [[0, 0, 1, 1, 1, -1, -1], [-1] * 7, [0, 0, 0, 0, -1, -1, -1]]
    learned = [[0, 1, 0, 1, 1, 0, 0], [0] * 7, [0, 0, 1, 1, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[bool(one) for one in row] for row in learned]
    assert batch.target == ([("doc1", 0, 0), ("doc0", 0, 2), ("doc2", 2, 0)], (3, 7), "the head")
    assert batch.features == (2, -1)


def test_packing_is_drawn_from_the_seed() -> None:
    rows = [PackedSource.of(one_text_a_row([2] * 12).source, 4, seed).rows for seed in (0, 1, 0)]
    assert rows[0] == rows[2] != rows[1]


def test_a_rank_reads_its_own_micro_steps() -> None:
    """Two ranks with two micro-steps of one row: rank 1 reads the second and the fourth row of a step."""
    rows = one_text_a_row()
    reader = StepReader(rows, Order(8, 4, seed=3), split=(1, 2, 2, 1))
    for step, batches in enumerate(reader.steps(0, 3)):
        wanted = reader.order.rows_of_step(step)
        assert reader.rows_of(step, 1) == [[wanted[1]], [wanted[3]]]
        assert [batch.ids.tolist() for batch in batches] == [rows.batch([wanted[n]]).ids.tolist() for n in (1, 3)]


def test_waiting_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps, for each of which the clock ticks once while it is waited for."""
    monkeypatch.setattr("train.batches.time", Clock(tick=1.0))
    reader = StepReader(one_text_a_row(), Order(8, 1, seed=0), split=(0, 1, 1, 1))
    assert reader.wait_s == 0.0
    assert len(list(reader.steps(0, 3))) == 3
    assert reader.wait_s == 3.0


def test_a_rank_can_name_the_documents_of_another() -> None:
    packed = PackedSource(told(), [(1, 0), (2,)], 7)
    reader = StepReader(packed, Order(2, 2, seed=3), split=(0, 2, 1, 1))
    mine, theirs = (["doc1", "doc0"], ["doc2"])[:: 1 if reader.order.rows_of_step(0) == [0, 1] else -1]
    assert reader.documents_of(0, rank=0) == mine
    assert reader.documents_of(0, rank=1) == theirs
