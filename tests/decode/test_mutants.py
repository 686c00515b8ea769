"""Known bugs of speculative decoders, put back one at a time: the named check must notice each.

That the checks pass without a bug is what the other tests say."""

from __future__ import annotations

import pytest

from tests.decode.mutants import MUTANTS


@pytest.mark.parametrize("name", MUTANTS)
def test_known_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, check = MUTANTS[name]
    patch(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):  # torch refuses an index out of bounds by RuntimeError
        check()
