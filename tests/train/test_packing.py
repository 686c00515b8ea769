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
