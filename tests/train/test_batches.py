"""Packed rows keep documents apart, and reading ahead changes nothing."""

from pathlib import Path

import pytest
import torch

from decode.drafters.lm import LMDraft
from decode.models import load_tokenizer
from distill.config import ObjectiveConfig
from distill.corpora import load_corpus
from distill.records import RecordFolder
from distill.sequences import record_sequences, text_sequences
from tests.tiny import tiny_llama
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


def test_a_rank_can_name_the_documents_of_another(text: PackedSource) -> None:
    reader = StepReader(text, Order(len(text.rows), 4, seed=3), split=(0, 2, 1, 2))
    names = reader.documents_of(0, rank=1)
    assert names
    assert all(name.endswith(".txt") for name in names)
