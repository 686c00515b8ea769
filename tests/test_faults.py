"""The tool that puts faults in: what it changes, what it gives back, what it refuses."""

from __future__ import annotations

from contextlib import suppress

import pytest

from decode.forward.runner import rounded
from tests.faults import Fault, check_caught


def capacity_is_rounded_up() -> None:
    assert rounded(1) == 256


def nothing_is_asserted() -> None:
    rounded(1)


FAULT = Fault("decode.forward.runner:rounded", "-(-capacity // BUCKET)", "(capacity // BUCKET)", capacity_is_rounded_up)


def test_a_fault_is_put_into_the_function_that_others_have_imported(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_caught(FAULT, request, monkeypatch)
    assert rounded(1) == 0
    monkeypatch.undo()
    assert rounded(1) == 256


def test_a_test_that_notices_nothing_is_told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    blind = Fault(FAULT.where, FAULT.old, FAULT.new, nothing_is_asserted)
    noticed = True
    with suppress(pytest.fail.Exception):
        check_caught(blind, request, monkeypatch)
        noticed = False
    assert noticed


def test_text_that_has_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="stands 0 times"):
        Fault(FAULT.where, "capacity // ROOM", "0", capacity_is_rounded_up).put_in(monkeypatch)


def test_constants_are_faults_too(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(Fault("decode.forward.runner:BUCKET", "256", "128", capacity_is_rounded_up), request, monkeypatch)
