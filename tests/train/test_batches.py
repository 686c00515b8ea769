"""Packed rows hold every sequence once, keep documents apart, and are read in an order of the seed and the step."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from decode.drafters.base import Batch
from decode.drafters.lm import LMDraft
from decode.models.compatibility import load_tokenizer
from distill.corpora.configured import load_corpus
from distill.objectives.config import ObjectiveConfig
from distill.records.record_folder import RecordFolder
from distill.sequences import TextSequences, TrainSequence, record_sequences, text_sequences
from tests.tiny import tiny_llama
from tests.train.small_loop import Clock, one_text_a_row
from tests.train.toy import model_config, text_data
from train.batches import PADDING, PackedSource, StepReader, readers_of
from train.loss import DraftLoss
from train.packing import Order, pack, share
from train.served_target import ServedSequences


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


@pytest.mark.parametrize("readers", [1, 4])
def test_reading_ahead_gives_the_batches_of_the_steps(text: PackedSource, readers: int) -> None:
    order = Order(len(text.rows), 4, seed=3)
    reader = StepReader(text, order, split=(1, 2, 1, 2), readers=readers)
    for step, batches in enumerate(reader.steps(2, 5), start=2):
        wanted = text.batch(order.rows_of_step(step)[2:])
        assert torch.equal(batches[0].ids, wanted.ids)
    assert list(reader.steps(5, 5)) == []


class Told(TextSequences):
    """Says what it was asked for."""

    def collate(self, items: Any, shape: Any, device: Any, head: Any = None) -> Any:
        """Where each text was placed."""
        return [(sequence.document, row, start) for sequence, row, start in items], shape, head

    def features(self, items: Any, shape: Any, layers: Any) -> Any:
        """Which ones were asked for."""
        return layers


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


@pytest.mark.parametrize("is_pinned", [False, True])
def test_batches_for_a_gpu_lie_where_it_copies_from(monkeypatch: pytest.MonkeyPatch, is_pinned: bool) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.double())
    reader = StepReader(one_text_a_row(), Order(8, 1, seed=0), split=(0, 1, 1, 1), is_pinned=is_pinned)
    ((batch,),) = reader.steps(0, 1)
    kinds = {one.dtype for one in (batch.ids, batch.positions, batch.document, batch.loss_mask)}
    assert (kinds == {torch.float64}) == is_pinned


def test_waiting_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps, for each of which the clock ticks once while it is waited for."""
    monkeypatch.setattr("train.batches.time", Clock(tick=1.0))
    reader = StepReader(one_text_a_row(), Order(8, 1, seed=0), split=(0, 1, 1, 1))
    assert reader.wait_s == 0.0
    assert len(list(reader.steps(0, 3))) == 3
    assert reader.wait_s == 3.0


def test_slow_records_are_read_by_several_threads_and_none_too_far_ahead() -> None:
    """Steps of 20 ms whose batches take 60 to read: four threads keep up with them, one does not."""
    waited = {}
    for readers in (1, 4):
        packed, begun = one_text_a_row(), list[int]()

        class Slow(StepReader):
            def _read(self, step: int, begun: list[int] = begun) -> list[Batch]:
                begun.append(step)
                time.sleep(0.06)
                return super()._read(step)

        reader = Slow(packed, Order(8, 1, seed=0), split=(0, 1, 1, 1), readers=readers)
        for step, _ in enumerate(reader.steps(0, 20)):
            time.sleep(0.02)
            assert max(begun) <= step + readers
        assert sorted(begun) == list(range(20))
        waited[readers] = reader.wait_s
    assert waited[4] < waited[1] / 3


def test_records_alone_are_read_by_several_threads(records: Path) -> None:
    """A server is asked for one batch after another: p and hidden states of two at once got mixed."""
    source = record_sequences(RecordFolder.open(records), "train", 32)
    assert [readers_of(source, kind) for kind in ("cuda", "cpu")] == [4, 1]
    assert readers_of(one_text_a_row().source, "cuda") == 1
    assert readers_of(ServedSequences(one_text_a_row().source, SimpleNamespace()), "cuda") == 1  # type: ignore[arg-type]


def test_a_rank_can_name_the_documents_of_another() -> None:
    packed = PackedSource(told(), [(1, 0), (2,)], 7)
    reader = StepReader(packed, Order(2, 2, seed=3), split=(0, 2, 1, 1))
    mine, theirs = (["doc1", "doc0"], ["doc2"])[:: 1 if reader.order.rows_of_step(0) == [0, 1] else -1]
    assert reader.documents_of(0, rank=0) == mine
    assert reader.documents_of(0, rank=1) == theirs


lengths = st.lists(st.integers(1, 20), min_size=1, max_size=60)


@given(lengths, st.integers(0, 3))
def test_every_sequence_lies_in_exactly_one_row_that_it_fits_into(lengths: list[int], seed: int) -> None:
    rows = pack(lengths, 20, seed)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 20 for row in rows)
    assert rows == pack(lengths, 20, seed)


@given(lengths)
def test_no_two_rows_could_have_been_one(lengths: list[int]) -> None:
    filled = sorted(sum(lengths[index] for index in row) for row in pack(lengths, 20, 0))
    assert len(filled) < 2 or filled[0] + filled[1] > 20


@given(st.integers(1, 30), st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_reads_every_row_once(num_rows: int, seed: int, epoch: int) -> None:
    order = Order(num_rows, 1, seed)
    read = [order.rows_of_step(epoch * num_rows + place)[0] for place in range(num_rows)]
    assert sorted(read) == list(range(num_rows))


def test_a_later_step_can_be_asked_for_first() -> None:
    forward, backward = Order(7, 3, 1), Order(7, 3, 1)
    steps = [forward.rows_of_step(step) for step in range(12)]
    assert steps == [backward.rows_of_step(step) for step in reversed(range(12))][::-1]
    assert steps != [Order(7, 3, 2).rows_of_step(step) for step in range(12)]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_ranks_and_micro_steps_share_a_step_without_overlap(ranks: int, micro_steps: int, size: int) -> None:
    rows = list(range(ranks * micro_steps * size))
    shares = [share(rows, rank, micro, size, ranks) for rank in range(ranks) for micro in range(micro_steps)]
    assert sorted(row for part in shares for row in part) == rows


def test_the_longest_go_first_and_each_where_it_leaves_least() -> None:
    """8 and 6 open rows, 5 a third; 3 goes to the 6 (1 left rather than 2), 2 fills up the 8 exactly. Whatever the
    seed: no two are equally long."""
    for seed in range(9):
        assert pack([5, 3, 8, 2, 6], 10, seed) == [(2, 3), (4, 1), (0,)]


def test_a_row_takes_more_for_as_long_as_there_is_room() -> None:
    """4 + 3 + 2 + 1 fill a row of 10, whose place in the lists of open rows changes each time."""
    assert pack([3, 1, 4, 2], 10, seed=0) == [(2, 0, 3, 1)]


def test_equally_long_texts_are_mixed() -> None:
    """Neighbours in a corpus are alike; in seeded order they come to lie in different rows."""
    rows = pack([5] * 40, 10, seed=0)
    assert rows != [(2 * row, 2 * row + 1) for row in range(20)]
    assert sum(abs(one - other) == 1 for one, other in rows) < 5
    assert rows != pack([5] * 40, 10, seed=1)


def test_every_epoch_has_an_order_of_its_own() -> None:
    order = Order(30, 30, seed=0)
    epochs = [order.rows_of_step(epoch) for epoch in range(3)] + [Order(30, 30, seed=1).rows_of_step(0)]
    assert len({tuple(rows) for rows in epochs}) == 4
    assert list(range(30)) not in epochs


def test_steps_follow_each_other_through_the_epochs() -> None:
    """Ten steps of 3 rows are six epochs of 5 rows."""
    order = Order(5, 3, seed=0)
    read = [row for step in range(10) for row in order.rows_of_step(step)]
    assert [sorted(read[place : place + 5]) for place in range(0, 30, 5)] == [[0, 1, 2, 3, 4]] * 6


def test_one_ranks_share_is_a_run_of_rows() -> None:
    """Two ranks, two rows at a time: the first micro-step of both comes before the second."""
    shares = [share(list("abcdefgh"), rank, micro, 2, 2) for rank in range(2) for micro in range(2)]  # type: ignore
    assert ["".join(part) for part in shares] == ["ab", "ef", "cd", "gh"]  # type: ignore[arg-type]
