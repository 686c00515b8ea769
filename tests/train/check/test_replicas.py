"""Replicas are only worth something as long as they share nothing with what they are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_import_direction import ROOT, imported_modules
from train.check.replicas import REPLICAS

FILES = sorted((ROOT / "train/check/replicas").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_replica_shares_nothing_with_our_modules(path: Path) -> None:
    ours = {name for name in imported_modules(path) if name.split(".")[0] in ("decode", "distill", "train", "eval")}
    assert all(name.startswith("train.check.replicas") for name in ours)


@pytest.mark.parametrize("form", REPLICAS)
def test_a_replica_is_short(form: str) -> None:
    assert len((ROOT / f"train/check/replicas/{form}.py").read_text().splitlines()) < 60
