"""Runs of distill with a server of OpenAI's protocol by proxy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.config import DistillConfig, RecordsConfig, StoreName, TargetConfig
from tests.distill.openai_fake_server import FakeOpenAi
from tests.distill.runs import tiny_config


def config_of(folder: Path, server: FakeOpenAi, output: str = "records", **changes: Any) -> DistillConfig:
    settings: dict[str, Any] = {"url": server.url, "timeout": 5.0} | changes.pop("target", {})
    store: list[StoreName] = changes.pop("store", ["topk"])
    own = {
        "target": TargetConfig(str(folder / "target"), runtime="openai", **settings),
        "records": RecordsConfig(store, topk=5, shard_size=5),
        "resume": "auto",
        "data": replace(tiny_config(folder).data, learn_prompt=False),
    }
    return tiny_config(folder, output, **own | changes)
