"""Faults put into distill are noticed by the tests that are named beside them."""

import pytest

from tests.distill.faults import FAULTS
from tests.faults import Fault, check_caught


@pytest.mark.slow  # they test the tests: 60 s of the default tier
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_noticed(fault: Fault, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(fault, request, monkeypatch)
