"""Runs of distill with a worker or a server by proxy in place of an engine."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from decode.common.checked_json import read_json
from decode.models.describe import describe_model
from distill.config import DistillConfig, TargetConfig
from distill.records.config import FeatureConfig, RecordsConfig, StoreName
from distill.records.record_folder import RecordFolder
from distill.runtimes import vllm_runtime
from tests.distill import vllm_proxy
from tests.distill.fake_servers import FakeOpenAi, FakeVllm
from tests.distill.runs import tiny_config
from tests.tiny import save_tiny_target, tiny_tokenizer

LAYERS = [2, -1, 0]
"""Of two: the last one's raw state, the final one, and the embeddings, in another order than the engine's."""
ASKED = [0, 2]
"""Those that a server gives for them."""


def proxy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the proxy, which notes there what it is asked."""
    folder = folder / "worker"
    folder.mkdir(parents=True)
    shutil.copy(vllm_proxy.__file__, folder / "worker.py")
    monkeypatch.setattr(vllm_runtime, "WORKER", folder / "worker.py")
    monkeypatch.setattr(vllm_runtime, "check_python", lambda *_: "0.fake")
    return folder


def config_of(folder: Path, output: str = "records", **changes: object) -> DistillConfig:
    if not (folder / "target").exists():
        model = AutoModelForCausalLM.from_pretrained(save_tiny_target(folder / "plain"))
        torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)  # a norm of ones would hide that it was not read
        model.save_pretrained(folder / "target")
        tiny_tokenizer().save_pretrained(folder / "target")
    own = {
        "target": TargetConfig(str(folder / "target"), runtime="vllm", vllm_python=sys.executable),
        "records": RecordsConfig(["head_tail", "full"], shard_size=5, features=FeatureConfig(list(LAYERS))),
    }
    return tiny_config(folder, output, **own | changes)


def served_config(folder: Path, server: FakeVllm, output: str = "records", **changes: Any) -> DistillConfig:
    settings: dict[str, Any] = {"path": str(folder / "target"), "url": server.url, "timeout": 3.0}
    settings |= {"states_folder": str(folder / "shared")} | changes.pop("target", {})
    own = {"target": TargetConfig(runtime="vllm", **settings)}
    return config_of(folder, output, **own | changes)


def openai_config(folder: Path, server: FakeOpenAi, output: str = "records", **changes: Any) -> DistillConfig:
    settings: dict[str, Any] = {"url": server.url, "timeout": 5.0} | changes.pop("target", {})
    store: list[StoreName] = changes.pop("store", ["topk"])
    own = {
        "target": TargetConfig(str(folder / "target"), runtime="openai", **settings),
        "records": RecordsConfig(store, topk=5, shard_size=5),
        "resume": "auto",
        "data": replace(tiny_config(folder).data, learn_prompt=False),
    }
    return tiny_config(folder, output, **own | changes)


def asked(worker: Path) -> list[dict]:
    return [json.loads(line) for line in (worker / "asked.jsonl").read_text().splitlines()]


def opened(folder: Path, output: str = "records") -> RecordFolder:
    return RecordFolder.open(folder / output, describe_model(TargetConfig(str(folder / "target")), loads=False))


def changed(folder: Path, fields: dict) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(read_json(file) | fields))


def quantised(folder: Path, packed: str | None = "lm_head.weight") -> None:
    """With its output head packed as well, or its layers alone."""
    changed(save_tiny_target(folder), {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = {name: f"{name}.packed" if name == packed or "proj" in name else name for name in tensors}
    assert packed is None or packed in tensors
    save_file({names[name]: one for name, one in tensors.items()}, file, metadata={"format": "pt"})
