"""Every fault of the register is noticed by the test that it names."""

from __future__ import annotations

import pytest

from tests.eval.faults import FAULTS
from tests.faults import Fault, check_caught


@pytest.mark.slow  # they test the tests: 60 s of the default tier
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_noticed(fault: Fault, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(fault, request, monkeypatch)
