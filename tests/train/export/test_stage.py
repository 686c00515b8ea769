"""`python -m train.export`: a folder appears whole or not at all; what cannot be served is refused with a reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import InputError, RunError
from decode.config import ModelConfig
from tests.tiny import save_tiny_target
from tests.train.toy import head_config, tiny_config
from train.export import stage
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.engines import ENGINES
from train.export.stage import run
from train.stage import run as train


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path, records: Path) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "run"
    train(tiny_config(folder, target, records=str(records), steps=1, validate_every=1, checkpoint_every=1))
    return folder


@pytest.fixture(scope="module")
def hydra(tmp_path_factory: pytest.TempPathFactory, target: Path, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("hydra") / "run"
    text = {"name": "text", "path": str(corpus)}
    train(head_config(folder, target, "hydra", data=text, steps=1, validate_every=1, checkpoint_every=1))
    return folder


def export(draft: Path, output: Path, form: str = "all", **given: Any) -> None:
    run(ExportConfig(format=form, output_dir=str(output), draft=SavedDraftConfig(path=str(draft)), **given))  # type: ignore[arg-type]


def test_a_folder_that_exists_is_left_alone(draft: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link"):
        with pytest.raises(InputError, match="exists, and an export never writes over anything"):
            export(draft, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


def test_an_export_that_fails_leaves_nothing(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(stage, "engine_card", fail)
    with pytest.raises(OSError, match="no space"):
        export(draft, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_hidden_folder_of_somebody_else_is_left_alone(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another export into the same folder, say: their files would mix."""
    kept = tmp_path / ".out.tmp" / "kept"
    kept.parent.mkdir()
    kept.write_text("kept")
    write, others = stage.write_one, []

    def write_while_another_does(*arguments: Any) -> None:
        if not others:
            others.append(True)
            export(draft, tmp_path / "out", "vllm")
        write(*arguments)

    monkeypatch.setattr(stage, "write_one", write_while_another_does)
    with pytest.raises(RunError, match="out appeared while the export ran"):
        export(draft, tmp_path / "out", "transformers")
    assert kept.read_text() == "kept"
    assert "vLLM" in (tmp_path / "out/README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.tmp", "out"]


def test_a_folder_that_cannot_be_made_is_refused(draft: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/out cannot be made \(Not a directory\)"):
        export(draft, tmp_path / "file" / "out")
    with pytest.raises(InputError, match="exists, and an export never writes over anything"):
        export(draft, tmp_path / "new" / "..")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_pair_that_does_not_exist_is_refused_with_all_that_do(draft: Path, hydra: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)TGI drafts with Medusa heads alone.* exist: vllm: lm.*transformers: lm"):
        export(draft, tmp_path / "out", "tgi")
    for form in ("vllm", "all"):
        with pytest.raises(InputError, match="no engine loads Hydra heads; train draft=eagle3"):
            export(hydra, tmp_path / "out", form)
    assert not list(tmp_path.iterdir())


def test_another_target_than_that_of_the_training_is_refused(hydra: Path, tmp_path: Path) -> None:
    other = save_tiny_target(tmp_path / "other", seed=5)
    with pytest.raises(InputError, match="trained on the hidden states of"):
        export(hydra, tmp_path / "out", target=ModelConfig(path=str(other)))


def test_a_target_that_is_not_where_it_was_trained_is_asked_for(draft: Path, tmp_path: Path) -> None:
    moved = tmp_path / "run"
    shutil.copytree(draft, moved)
    facts = moved / "model/draftsmith.json"
    written = json.loads(facts.read_text())
    written["target"]["path"] = "elsewhere/run/target"
    facts.write_text(json.dumps(written))
    with pytest.raises(InputError, match=r"is not set.*elsewhere/run/target.*does not exist.*Give target.path"):
        export(moved, tmp_path / "out")


def test_what_is_not_a_draft_of_ours_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no draftsmith.json"):
        export(target, tmp_path / "out")


def test_all_writes_a_folder_for_each_layout(draft: Path, tmp_path: Path) -> None:
    export(draft, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lm"]
    card = (tmp_path / "out/lm/README.md").read_text()
    assert all(ENGINES[name].title in card for name in ("vllm", "sglang", "trtllm", "llamacpp", "transformers"))
    assert "vllm serve" in card
    assert "THIS_FOLDER" in card
    assert str(tmp_path) not in card
