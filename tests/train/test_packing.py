"""Rows hold every sequence once, and the order of reading depends on nothing but the seed and the step."""

import hypothesis.strategies as st
from hypothesis import given

from train.packing import Order, pack, share

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
