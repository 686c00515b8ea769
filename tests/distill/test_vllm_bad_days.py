"""Engines that die, hang or find the disk full, by proxy (`vllm_proxy`)."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from decode.common.checked_json import read_json
from decode.common.errors import ConfigError, RunError
from distill.config import PromptConfig
from distill.stage import run
from tests.distill.vllm_runs import config_of, opened, proxy


def test_an_engine_that_dies_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    config = config_of(tmp_path)
    (worker / "die").touch()
    with pytest.raises(RunError, match="no room on the device"):
        run(config)


def test_an_engine_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    config = config_of(tmp_path)
    config.target.timeout = 2.0
    (worker / "hang").touch()
    began = time.monotonic()
    with pytest.raises(RunError, match=r"no sign of life for 2 s \(target\.timeout\).*resume=auto"):
        run(config)
    assert time.monotonic() - began < 60


def test_an_engine_that_takes_its_time_and_lives_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    config = config_of(tmp_path, prompts=PromptConfig(tokens=6, count=2, validation_count=0))
    config.target.timeout = 2.0
    (worker / "slow").touch()  # 2.5 s a call
    run(config)
    assert len(opened(tmp_path)) == 2


def test_a_full_disk_is_told_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    broken, whole = config_of(tmp_path, resume="auto"), config_of(tmp_path, "whole")
    (worker / "full").touch()
    with pytest.raises(RunError, match=r"did not write the hidden states.*records/states.*MB free.*resume=auto"):
        run(broken)
    (worker / "full").unlink()
    run(broken)
    run(whole)
    ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("records", "whole"))
    assert ours["shards"] == theirs["shards"]


def test_a_disk_without_room_for_states_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200_000))
    with pytest.raises(ConfigError, match=r"needs 0\.00 GB, and its disk has 0\.00 GB free"):
        run(config_of(tmp_path, batch_size=400))  # 400 texts of 14 tokens, 2 layers of 32 channels of 4 bytes
    assert not (worker / "asked.jsonl").exists()
    run(config_of(tmp_path))
