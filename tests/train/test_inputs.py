"""Inputs that do not fit together are refused before any weight is loaded, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from decode.house.errors import UserError
from tests.train.toy import data_settings, save_target, tiny_config
from train import stage


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a configuration that must be refused with this message."""

    def no_weights(*_: object) -> None:
        raise AssertionError("weights were about to be loaded")

    monkeypatch.setattr(stage, "build_machine", no_weights)
    monkeypatch.setattr(stage, "build_accelerator", no_weights)

    def check(target: Path | None, message: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=message):
            stage.run(tiny_config(tmp_path / "out", target, **changes))
        assert not (tmp_path / "out").exists()

    return check


def test_records_of_another_target(refuse, tmp_path: Path, records: Path) -> None:
    refuse(save_target(tmp_path / "other", seed=1), "other weights", records=str(records))


def test_a_draft_over_another_vocabulary(refuse, tmp_path: Path, target: Path, records: Path) -> None:
    other = save_target(tmp_path / "other", vocab_size=320)
    refuse(target, "320 vocabulary entries.*300", records=str(records), draft={"init_from": str(other)})


def test_a_draft_over_other_tokens_of_the_same_number(refuse, tmp_path: Path, target: Path, records: Path) -> None:
    other = shutil.copytree(target, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token, number in vocabulary.items() if number in (298, 299)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refuse(target, "tokenizers differ", records=str(records), draft={"init_from": str(other)})


@pytest.mark.parametrize("objective", ["reverse_kl", "jsd"])
def test_sparse_records_for_an_objective_that_needs_all_of_p(
    refuse, target: Path, records: Path, objective: str
) -> None:
    refuse(target, "these records are sparse", records=str(records), objective={"name": objective})


def test_a_truncated_shard(refuse, tmp_path: Path, target: Path, records: Path) -> None:
    cut = shutil.copytree(records, tmp_path / "cut")
    shard = next(cut.glob("shards/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    refuse(target, "cut short", records=str(cut))


def test_sequences_longer_than_the_context(refuse, target: Path, records: Path) -> None:
    refuse(target, "longer than the target's context, 256", records=str(records), sequence_length=257)
    draft = {"max_positions": 16}
    refuse(target, "longer than draft.max_positions, 16", records=str(records), draft=draft)


def test_too_little_text_for_one_step(refuse, target: Path, records: Path) -> None:
    refuse(target, "one step takes 4000", records=str(records), batch_size=4000)


def test_missing_paths(refuse, tmp_path: Path, target: Path, records: Path) -> None:
    refuse(tmp_path / "none", "does not exist", records=str(records))
    refuse(target, "no such record folder", records=str(tmp_path / "none"))
    refuse(target, "does not exist", records=str(records), draft={"init_from": str(tmp_path / "none")})
    missing = data_settings(tmp_path / "none")
    refuse(target, "none", data=missing, target_source="live")


def test_a_checkpoint_of_another_draft(tmp_path: Path, target: Path, records: Path) -> None:
    stage.run(tiny_config(tmp_path / "first", target, records=str(records)))
    changes = {"records": str(records), "resume": str(tmp_path / "first"), "draft": {"width": 32}}
    with pytest.raises(UserError, match="was made with draft="):
        stage.run(tiny_config(tmp_path / "out", target, **changes))


def test_an_unfinished_run_of_another_configuration(tmp_path: Path, target: Path, records: Path) -> None:
    stage.run(tiny_config(tmp_path / "out", target, records=str(records)))
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(UserError, match="lr: 0.01 there, 0.5 now"):
        stage.run(tiny_config(tmp_path / "out", target, records=str(records), lr=0.5, resume="auto"))
