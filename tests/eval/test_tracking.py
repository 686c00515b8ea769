"""The finished report reaches an offline W&B run as an artifact."""

import os
from pathlib import Path

import pytest

from decode.common.typed_config import build
from eval.config import EvalConfig
from eval.render.files import FILES, track_report
from tests.eval.reports import report
from tests.train.test_trackers import wandb_records

FOLDERS = ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR")
RESULTS = report()


def config(name: str) -> EvalConfig:
    values = {"output_dir": "x", "target": {"path": "t"}, "drafts": {"d": "d"}, "tracker": {"name": name}}
    return build(EvalConfig, values)


def write_report(folder: Path) -> None:
    for name in FILES:
        (folder / name).write_text(f"content of {name}")


def test_without_wandb_nothing_is_written(tmp_path):
    write_report(tmp_path)
    track_report(config("jsonl"), tmp_path, RESULTS)
    assert {file.name for file in tmp_path.iterdir()} == set(FILES)


@pytest.mark.slow
def test_the_offline_run_holds_the_report_and_its_figures(tmp_path, monkeypatch):
    service = pytest.importorskip("wandb.sdk.lib.service.service_connection").ServiceConnection
    # W&B's own process hears of a run's end without an answer, and on a busy machine closes its file seconds later:
    # here it does not hear of it at all.
    monkeypatch.setattr(service, "inform_finish", lambda *_, **__: None)
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    write_report(tmp_path)
    before = dict(os.environ)
    track_report(config("wandb"), tmp_path, RESULTS)
    assert dict(os.environ) == before  # the next run of this process would write into this one's folder
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = list(wandb_records(file))
    (artifact,) = [record.artifact for record in found if record.WhichOneof("record_type") == "artifact"]
    assert artifact.type == "report"
    assert {entry.path for entry in artifact.manifest.contents} == set(FILES)
    summary = {item.key: item.value_json for record in found for item in record.summary.update}
    assert summary["mine/T=1/alpha"] == "0.75"
