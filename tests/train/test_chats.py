"""Training on chats: their settings, their day, and a chat template that changed while the run lay unfinished."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from decode.common.checked_json import read_json
from decode.common.errors import ConfigError
from decode.common.typed_config import build
from decode.config import ModelConfig
from decode.models.describe import describe_model
from distill.stage import run as distill
from tests.distill.chats import CHATML, DATED, WITHOUT_SYSTEM, chat_config, chats_of, on_day, set_template, write_chats
from tests.train.toy import tiny_config
from train import stage
from train.config import TrainConfig
from train.training_inputs import Inputs, open_inputs


def live(folder: Path, **changes: Any) -> TrainConfig:
    """Training on the chats in `folder` beside the target there."""
    data = asdict(chats_of(folder)) | changes.pop("data", {})
    return tiny_config(
        folder / "out", folder / "target", data=data, target_source="live", sequence_length=64, **changes
    )


def killed(cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, "keep_result", die)
        with pytest.raises(KeyboardInterrupt):
            stage.run(cfg)


def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(stage, "load_model", load)


def test_training_on_chats_does_not_go_on_with_another_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_template(tmp_path / "target", CHATML)
    killed(live(tmp_path), monkeypatch)
    before = describe_model(ModelConfig(path=str(tmp_path / "target"))).chat_template_hash
    set_template(tmp_path / "target", CHATML + "!")
    after = describe_model(ModelConfig(path=str(tmp_path / "target"))).chat_template_hash
    loads_nothing(monkeypatch)
    with pytest.raises(ConfigError, match=f"begun with chat_template_hash {before}, and it is {after} now"):
        stage.run(live(tmp_path, resume="auto"))


def test_training_that_goes_on_the_next_day_speaks_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_template(tmp_path / "target", DATED)
    on_day("2026-07-31", monkeypatch)
    killed(live(tmp_path), monkeypatch)
    on_day("2026-08-01", monkeypatch)
    stage.run(live(tmp_path, resume="auto"))
    said = read_json(tmp_path / "out" / "model" / "draftsmith.json")
    assert (said["data"]["date"], said["config"]["data"]["date"]) == ("2026-07-31", "2026-07-31")


@pytest.mark.parametrize(
    ("template", "data", "expected"),
    [
        (CHATML, {}, "<|system|>Be brief.<eos>\n<|user|>def f"),
        (CHATML, {"system": "drop"}, "<|user|>def f"),
        (WITHOUT_SYSTEM, {"system": "merge"}, "<|user|>Be brief.\n\ndef f"),
        (DATED, {"date": "2026-02-03"}, "03 Feb 2026\n<|system|>"),
        ("{{ style }}" + CHATML, {"template": {"style": "plain "}}, "plain <|system|>"),
    ],
)
def test_texts_are_written_by_the_settings_of_chats(
    tmp_path: Path, template: str, data: dict[str, Any], expected: str
) -> None:
    set_template(tmp_path / "target", template)
    write_chats(tmp_path, system="Be brief.")
    inputs = open_inputs(live(tmp_path, data=data))
    texts = inputs.train.source
    found = [str(inputs.tokenizer.decode(texts[index].ids)) for index in range(len(texts))]
    assert found
    assert all(text.startswith(expected) for text in found)


def test_settings_that_would_change_nothing_are_refused(tmp_path: Path) -> None:
    set_template(tmp_path / "target", CHATML)
    with pytest.raises(ConfigError, match=r"never reads, .* it reads think"):
        stage.run(live(tmp_path, data={"template": {"thinks": False}}))
    text = {"name": "text", "path": str(tmp_path), "template": {"think": False}}
    with pytest.raises(ConfigError, match="data=text holds plain text alone"):
        build(TrainConfig, {"output_dir": "out", "target": {"path": "t"}, "target_source": "live", "data": text})


def test_a_draft_says_how_the_chats_of_its_records_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_day("2026-07-31", monkeypatch)
    distill(chat_config(tmp_path, DATED, chats_of(tmp_path, template={"think": False})))
    cfg = tiny_config(tmp_path / "out", tmp_path / "target", records=str(tmp_path / "records"), sequence_length=64)
    stage.run(cfg)
    data = json.loads((tmp_path / "out" / "model" / "draftsmith.json").read_text())["data"]
    assert (data["date"], data["template"]) == ("2026-07-31", {"think": False})


def test_a_rank_that_started_after_midnight_reads_the_texts_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_template(tmp_path / "target", DATED)
    on_day("2026-08-01", monkeypatch)
    days = []

    def first_rank_s(_: bool, do: Any) -> Any:
        return replace(do(), date="2026-07-31")

    def opened(cfg: TrainConfig) -> Inputs:
        assert cfg.data is not None
        days.append(cfg.data.date)
        return open_inputs(cfg)

    monkeypatch.setattr(stage, "on_main", first_rank_s)
    monkeypatch.setattr(stage, "open_inputs", opened)
    monkeypatch.setattr(stage, "_train", lambda cfg, inputs, *_: days.append(first_day(inputs)))
    stage.run(live(tmp_path))
    assert days == ["2026-07-31", "31 Jul 2026"]


def first_day(inputs: Inputs) -> str:
    return str(inputs.tokenizer.decode(inputs.train.source[0].ids)).splitlines()[0]
