"""Servers by proxy: of vLLM, and of OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distill.engines import http_client
from distill.runtimes import vllm_server
from tests.distill.engine_runs import ASKED, config_of
from tests.distill.fake_servers import FakeOpenAi, FakeVllm, fake_openai, fake_vllm
from tests.tiny import save_tiny_target


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    """One of the target in `tmp_path`, that is not waited for long."""
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(vllm_server, "PATIENCE_S", 0.2)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    config_of(tmp_path)
    with fake_vllm(tmp_path / "target", tmp_path / "shared", list(ASKED)) as fake:
        yield fake


@pytest.fixture
def openai_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOpenAi]:
    """One of the target in `tmp_path`, that is not waited for long."""
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.01)
    with fake_openai(save_tiny_target(tmp_path / "target"), 300) as fake:
        yield fake
