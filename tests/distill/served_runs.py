"""Runs of distill with a vLLM server by proxy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill.config import DistillConfig, TargetConfig
from distill.runtimes import http_client, served_runtime, vllm_server
from tests.distill.vllm_fake_server import FakeVllm, fake_vllm
from tests.distill.vllm_runs import config_of as engine_config

ASKED = [0, 2]
"""Of `vllm_runs.LAYERS`: those that the server gives, the last one's raw state among them."""


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(vllm_server, "PATIENCE_S", 0.2)
    monkeypatch.setattr(served_runtime, "PATIENCE_S", 0.2)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeVllm]:
    engine_config(tmp_path)
    with fake_vllm(tmp_path / "target", tmp_path / "shared", list(ASKED)) as fake:
        yield fake


def config_of(folder: Path, server: FakeVllm, output: str = "records", **changes: Any) -> DistillConfig:
    settings: dict[str, Any] = {"path": str(folder / "target"), "url": server.url, "timeout": 3.0}
    settings |= {"states_folder": str(folder / "shared")} | changes.pop("target", {})
    own = {"target": TargetConfig(runtime="vllm", **settings)}
    return engine_config(folder, output, **own | changes)
