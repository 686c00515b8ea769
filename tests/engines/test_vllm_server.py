"""Records made by a vLLM server on loopback against those of transformers, a draft that learns from two such servers,
and servers that are killed in mid-run."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from decode.common.errors import ConfigError
from decode.config import ModelConfig
from decode.models.describe import describe_model
from distill.config import DistillConfig, ResponseSampling, TargetConfig
from distill.records.record_folder import RecordFolder
from distill.stage import run
from tests.distill.runs import shard_files, tiny_config
from tests.engines.test_records import assert_agree, recorded, save_target, settings
from tests.engines.vllm_serving import KEY, Server
from tests.train.test_processes import LAUNCHER
from tests.train.toy import ROOT, command, data_settings, head_settings, metrics, write_corpus

pytestmark = pytest.mark.engines
ASKED = [0, 1, 3]
"""Of `test_records.LAYERS`, with the last one's raw state."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    save_target(folder / "target", "llama")
    found = Server(folder / "target", folder / "shared", ASKED)
    try:
        found.start(folder / "log")
        yield found
    finally:
        found.kill()


def config_of(server: Server, output: str, **changes: object) -> DistillConfig:
    folder = server.target.parent
    settings_of = {"url": server.url, "states_folder": str(server.folder), "timeout": 240.0}
    target = TargetConfig(str(server.target), runtime="vllm", **settings_of)  # type: ignore[arg-type]
    return tiny_config(folder, output, **settings("vllm", folder, target=target, **changes))


def opened(server: Server, output: str) -> RecordFolder:
    target = describe_model(ModelConfig(path=str(server.target)))
    return RecordFolder.open(server.target.parent / output, target)


def test_records_of_a_server_are_those_of_transformers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    ours = recorded(server.target.parent, "transformers", "transformers")
    run(config_of(server, "served"))
    assert_agree(ours, opened(server, "served"))
    assert not list(server.folder.iterdir())


def test_a_wrong_key_and_other_layers_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "another")
    with pytest.raises(ConfigError, match="asks for a key"):
        run(config_of(server, "refused"))
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    config = config_of(server, "refused")
    config.records.features.layers = [2]
    with pytest.raises(ConfigError, match=r"layers \[2, 3\]"):
        run(config)


@torch.no_grad()
def test_a_server_that_is_killed_and_started_again_loses_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it writes, at temperature 1, and as it reads. What was kept stays; each text has p of the target."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    folder = server.target.parent
    config = config_of(server, "killed", sampling=ResponseSampling(max_new_tokens=12), resume="auto")
    failed: list[BaseException] = []
    thread = threading.Thread(target=_noting(failed, lambda: run(config)))
    thread.start()
    kept: dict[Path, bytes] = {}
    for pattern in ("responses/*.safetensors", "shards/*.json"):
        _await(folder / "killed", pattern, thread)
        server.kill()
        kept |= {file: file.read_bytes() for file in (folder / "killed/shards").glob("*")}
        server.start(folder / "log")
    thread.join()
    assert not failed
    assert all(file.read_bytes() == content for file, content in kept.items())
    records, target = opened(server, "killed"), AutoModelForCausalLM.from_pretrained(server.target).eval()
    assert [(records.read(n).meta["prompt"], records.read(n).meta["turn"]) for n in range(13)] == [
        (n, 0) for n in range(13)
    ]
    for index in range(13):
        record = records.read(index)
        log_p = target(torch.from_numpy(record.ids)[None]).logits[0].log_softmax(-1)
        wanted = log_p[np.flatnonzero(record.loss_mask) - 1].numpy()
        np.testing.assert_allclose(record.payload["full.log_p"], wanted, rtol=2e-3, atol=1e-2)
    assert len(shard_files(folder / "killed")) == 3


def test_two_processes_learn_from_two_servers_what_the_live_target_teaches(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which one is killed in mid-run and started again: nothing is lost, nothing read twice."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    folder = server.target.parent
    corpus, other = write_corpus(folder / "corpus"), Server(server.target, server.folder, ASKED)
    head = {"head": {"taps": [0, 1, -1]}, "data": data_settings(corpus), "steps": 24, "lr": 3e-3, "log_every": 1}
    both = head | {"engine": {"name": "ddp"}, "batch_size": 1, "objective": {"credit": "decay"}}
    servers = {"urls": [server.url, other.url], "states_folder": str(server.folder), "timeout": 240.0}
    live = training(head_settings(folder / "live", server.target, target_source="live", **both))
    assert live.wait() == 0
    try:
        other.start(folder / "other_log")
        settings = head_settings(folder / "learned", server.target, target_source="served", servers=servers, **both)
        learning = training(settings)
        while not (folder / "learned/metrics.jsonl").is_file():
            assert learning.poll() is None
            time.sleep(0.002)
        other.kill()
        other.start(folder / "other_log")
        assert learning.wait() == 0
    finally:
        other.kill()
    ours, theirs = ([line["loss"] for line in metrics(folder / name)] for name in ("learned", "live"))
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert not list(server.folder.iterdir())


def training(settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(settings, LAUNCHER), cwd=ROOT, env=environment)


def _noting(failed: list[BaseException], do: Callable[[], None]) -> Callable[[], None]:
    def noted() -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    return noted


def _await(folder: Path, pattern: str, thread: threading.Thread) -> None:
    ends = time.monotonic() + 240
    while not list(folder.glob(pattern)):
        assert thread.is_alive()
        assert time.monotonic() < ends
        time.sleep(0.002)
