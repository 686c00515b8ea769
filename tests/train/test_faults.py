"""Every fault of `tests/train/faults.py` is noticed by the test named beside it."""

import pytest

from tests.faults import Fault, check_caught
from tests.train.faults import FAULTS


@pytest.mark.slow  # they test the tests: 60 s of the default tier
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_noticed(fault: Fault, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(fault, request, monkeypatch)
