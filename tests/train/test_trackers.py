"""A W&B run, made offline by a real training process, read back from its file."""

from __future__ import annotations

import json
import os
import re
import shlex
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.toy import ROOT, command, metrics, tiny_config, tiny_settings
from train.metrics_log import METRICS, MetricsLog
from train.trackers import build_tracker

HEADER_BYTES, BLOCK_BYTES, CHUNK_HEADER_BYTES = 7, 1 << 15, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def wandb_records(file: Path) -> Iterator[Any]:
    """wandb_internal_pb2.Record messages, in order."""
    from wandb.proto import wandb_internal_pb2

    for content in _contents(file.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(content)
        yield record


def _contents(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    place, parts = HEADER_BYTES, b""
    while place + CHUNK_HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < CHUNK_HEADER_BYTES:  # too little for another chunk: the rest of the block is padding
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + CHUNK_HEADER_BYTES])
        if kind == 0:
            place += left
            continue
        start = place + CHUNK_HEADER_BYTES
        place = start + length
        parts = data[start:place] if kind in (FULL, FIRST) else parts + data[start:place]
        if kind in (FULL, LAST):
            yield parts


@pytest.mark.slow
def test_an_offline_run_holds_config_curves_and_report(tmp_path: Path, target: Path, records: Path) -> None:
    settings = tiny_settings(tmp_path / "out", target, records=str(records), lr=0.0125)
    arguments = [*command(settings), "tracker=wandb", "tracker.project=toy"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment |= {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path / "home")}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (file,) = (tmp_path / "out").glob("wandb/offline-run-*/*.wandb")
    named = re.findall(r"to Weights & Biases: wandb sync (\S+)", done.stderr)
    assert named == [str(file.parent)]
    found = list(wandb_records(file))
    assert _config(found)["lr"] == 0.0125
    assert _config(found)["objective"]["name"] == "forward_kl"
    curves, lines = _curves(found), metrics(tmp_path / "out", "train")
    for name in ("loss", "alpha", "tau", "tokens_per_s"):
        assert curves[f"train/{name}"] == [(line["step"], pytest.approx(line[name])) for line in lines], name
    assert curves["validation/tau"]
    (artifact,) = [record.artifact for record in found if record.WhichOneof("record_type") == "artifact"]
    assert artifact.type == "report"
    assert {entry.path for entry in artifact.manifest.contents} == {"README.md", "result.json"}
    assert all(Path(entry.local_path).is_file() for entry in artifact.manifest.contents)
    assert not (tmp_path / "home").exists(), "W&B wrote outside of the run folder"


@pytest.mark.slow
def test_the_last_part_of_a_resumed_run_holds_all_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each part lies in a folder of its own. `wandb sync` of both lets the second replace the first; where that was
    killed, it stops at its last record, which is not whole, and never comes to the second."""
    cfg = tiny_config(tmp_path, Path("target"), records="none", tracker={"name": "wandb"})
    lines = [{"kind": "train", "step": step, "loss": 1 / step} for step in range(1, 6)]
    log = MetricsLog(tmp_path / METRICS)
    first = build_tracker(cfg, tmp_path, "abcd1234", is_main=True)
    positions = []
    for line in lines[:4]:
        log.write(line)
        first.log(line)
        positions.append(log.position)
    first.wandb.teardown(exit_code=1)  # type: ignore[attr-defined]
    first._forget_places()  # type: ignore[attr-defined]
    log.close()
    log = MetricsLog(tmp_path / METRICS, positions[1])  # as of the checkpoint at step 2
    second = build_tracker(cfg, tmp_path, "abcd1234", is_main=True)
    for line in lines[2:]:
        second.log(line)
    with caplog.at_level("INFO"):
        second.finish([], {"loss": 0.2})
    (said,) = [one.message for one in caplog.records if "wandb sync" in one.message]
    (folder,) = shlex.split(said.partition("wandb sync ")[2])
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2
    (file,) = Path(folder).glob("*.wandb")
    assert _curves(list(wandb_records(file)))["train/loss"] == [(step, pytest.approx(1 / step)) for step in range(1, 6)]


def _config(found: list) -> dict:
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    return {item.key: json.loads(item.value_json) for item in runs[0].config.update}


def _curves(found: list) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in found:
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                curves.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
    return curves
