"""Every fault of `tests/decode/formats/faults.py` is noticed by the test named beside it."""

import pytest

from tests.decode.formats.faults import FAULTS
from tests.decode.formats.test_bad_input import target_folder as target_folder  # fixtures
from tests.decode.formats.test_published import target as target
from tests.faults import Fault, check_caught


@pytest.mark.slow  # they test the tests: 60 s of the default tier
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_noticed(fault: Fault, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(fault, request, monkeypatch)
