"""Sums and counts are added and divided once."""

import json
from dataclasses import asdict

import torch

from train.metric_sums import Sums

ONE = Sums(6.0, 3.0, 2.0, 4.0, 9.0, 2.0, 10.0, 1.5, 6.0, 1.0, 5.0)


def test_each_sum_is_divided_by_its_own_count() -> None:
    means = {"loss": 2.0, "alpha": 0.5, "tau": 4.5, "alpha_greedy": 0.25, "tau_greedy": 2.5, "confidence_loss": 0.25}
    assert ONE.means() == means


def test_what_was_never_counted_has_no_mean() -> None:
    """Rather than 0, which would be a loss to be proud of."""
    assert Sums().tensor().tolist() == [0.0] * 11
    assert set(Sums(tokens=5.0).means().values()) == {None}


def test_the_mean_of_two_parts_is_over_all_that_they_counted() -> None:
    """1 and 3, from one slot and from three, are 2.5; the mean of the means would be 2."""
    both = Sums(loss=1.0, loss_count=1.0) + Sums(loss=9.0, loss_count=3.0)
    assert both.means()["loss"] == 2.5
    assert ONE + ONE == Sums(12.0, 6.0, 4.0, 8.0, 18.0, 4.0, 20.0, 3.0, 12.0, 2.0, 10.0)


def test_counts_travel_exactly_however_large() -> None:
    """A run reads more tokens than float32 can count."""
    many = Sums(tokens=2.0**24 + 1)
    again = Sums.from_tensor(many.tensor())
    assert again == many
    assert json.loads(json.dumps(asdict(again))) == asdict(many)  # as a checkpoint keeps them
    assert ONE.tensor().tolist() == [6.0, 3.0, 2.0, 4.0, 9.0, 2.0, 10.0, 1.5, 6.0, 1.0, 5.0]
    assert ONE.tensor(torch.device("meta")).device.type == "meta"
