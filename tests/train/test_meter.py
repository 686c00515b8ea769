"""Rates by a clock that the test moves."""

import pytest

from tests.train.clock import Clock
from train.speed_meter import Meter


def test_rates_are_of_the_time_since_the_last_reading_and_the_eta_of_all(clock: Clock) -> None:
    """A run of 10 steps that goes on at step 2: 2 steps in 4 s, then 2 more in 2 s with a validation of 3 s between."""
    meter = Meter(steps=10, first_step=2)
    meter.add(60)
    meter.add(40)
    clock.now = 4.0
    first = meter.read(4, wait_s=1.0)
    assert first == {"tokens_per_s": 25.0, "eta_s": pytest.approx(12.0), "data_wait_share": 0.25}
    meter.add(60)
    for seconds in (1.0, 2.0):
        with meter.pause():
            clock.now += seconds
    clock.now = 9.0
    second = meter.read(6, wait_s=1.5)
    assert second == {"tokens_per_s": 30.0, "eta_s": pytest.approx(9.0), "data_wait_share": 0.25}


def test_a_reading_before_the_first_step_divides_by_nothing(clock: Clock) -> None:
    clock.now = 2.0
    meter = Meter(steps=5, first_step=3)
    assert meter.read(3, wait_s=0.0) == {"tokens_per_s": 0.0, "eta_s": 0.0, "data_wait_share": 0.0}
