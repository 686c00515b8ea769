"""Runs of distill with a vLLM server by proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill.config import DistillConfig, TargetConfig
from tests.distill.vllm_fake_server import FakeVllm
from tests.distill.vllm_runs import config_of as engine_config

ASKED = [0, 2]
"""Of `vllm_runs.LAYERS`: those that the server gives, the last one's raw state among them."""


def config_of(folder: Path, server: FakeVllm, output: str = "records", **changes: Any) -> DistillConfig:
    settings: dict[str, Any] = {"path": str(folder / "target"), "url": server.url, "timeout": 3.0}
    settings |= {"states_folder": str(folder / "shared")} | changes.pop("target", {})
    own = {"target": TargetConfig(runtime="vllm", **settings)}
    return engine_config(folder, output, **own | changes)
