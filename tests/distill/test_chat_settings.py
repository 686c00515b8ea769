"""The chat template of a run: it stays the same until the run is finished, and so does the day that it speaks of."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from decode.common.checked_json import read_json
from decode.common.errors import ConfigError, InputError
from decode.config import ModelConfig
from decode.models.load import describe_model
from distill.config import DataConfig, PromptConfig, ResponseSampling
from distill.records.record_folder import RecordFolder
from distill.runtimes import transformers_runtime
from distill.stage import run
from tests.distill.chats import CHATML, DATED, WITHOUT_SYSTEM, chat_config, chats_of, on_day, set_template, write_chats
from tests.distill.runs import shard_files
from tests.distill.test_drafted_responses import Stopped, stop_at


def stopped(monkeypatch: pytest.MonkeyPatch, folder: Path, *given: object, **fields: object) -> None:
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        with pytest.raises(Stopped):
            run(chat_config(folder, *given, **fields))  # type: ignore[arg-type]


def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(transformers_runtime, "load_model", load)


def prompts_in(folder: Path) -> set[str]:
    """The texts of all records up to where the answer begins."""
    records, tokenizer = RecordFolder.open(folder), AutoTokenizer.from_pretrained(folder.parent / "target")
    found = [records.read(index) for index in range(len(records))]
    return {str(tokenizer.decode(one.ids[: one.meta["prompt_end"]])) for one in found}


def test_a_run_does_not_go_on_with_another_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages are the same, and the prompts would be others."""
    stopped(monkeypatch, tmp_path)
    before = describe_model(ModelConfig(path=str(tmp_path / "target"))).chat_template_hash
    set_template(tmp_path / "target", CHATML + "!")
    after = describe_model(ModelConfig(path=str(tmp_path / "target"))).chat_template_hash
    loads_nothing(monkeypatch)
    with pytest.raises(ConfigError, match=f"begun with chat_template_hash {before}, and it is {after} now"):
        run(chat_config(tmp_path, resume="auto"))


def test_a_run_does_not_go_on_with_a_tokenizer_that_cuts_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is the same, and what is done before it is not."""
    stopped(monkeypatch, tmp_path)
    file = tmp_path / "target" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    loads_nothing(monkeypatch)
    with pytest.raises(ConfigError, match="begun with tokenizer_hash"):
        run(chat_config(tmp_path, resume="auto"))


def test_a_run_does_not_go_on_with_other_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = chats_of(tmp_path, template={"think": False})
    stopped(monkeypatch, tmp_path, data=data)
    with pytest.raises(ConfigError, match="data.template.think: False there, True now"):
        run(chat_config(tmp_path, data=chats_of(tmp_path, template={"think": True}), resume="auto"))
    run(chat_config(tmp_path, data=data, resume="auto"))
    assert all(prompt.endswith("<|assistant|><think></think>") for prompt in prompts_in(tmp_path / "records"))
    assert read_json(tmp_path / "records" / "manifest.json")["config"]["data"]["template"] == {"think": False}


@pytest.mark.parametrize("responses", ["target", "corpus"])
def test_a_run_that_goes_on_the_next_day_speaks_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, responses: str
) -> None:
    on_day("2026-07-31", monkeypatch)
    stopped(monkeypatch, tmp_path, DATED, responses=responses)
    on_day("2026-08-01", monkeypatch)
    caplog.clear()
    run(chat_config(tmp_path, responses=responses, resume="auto"))
    told = "the chat template writes the date: all chats of this run are of 2026-07-31 (data.date names another)"
    assert [one.getMessage() for one in caplog.records].count(told) == 1
    prompts = prompts_in(tmp_path / "records")
    assert len(prompts) == 13
    assert all(prompt.startswith("31 Jul 2026\n") for prompt in prompts)
    assert read_json(tmp_path / "records" / "manifest.json")["config"]["data"]["date"] == "2026-07-31"
    whole = chats_of(tmp_path, date="2026-07-31")
    run(chat_config(tmp_path, data=whole, responses=responses, output_dir=str(tmp_path / "whole")))
    assert shard_files(tmp_path / "records") == shard_files(tmp_path / "whole")


def test_texts_that_are_scored_again_keep_their_day_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_day("2026-07-31", monkeypatch)
    run(chat_config(tmp_path, DATED, chats_of(tmp_path, template={"think": False})))
    on_day("2026-08-01", monkeypatch)
    again = {"responses": "records", "from_records": str(tmp_path / "records"), "output_dir": str(tmp_path / "again")}
    own = {"data": DataConfig(), "prompts": PromptConfig(), "sampling": ResponseSampling()}
    run(chat_config(tmp_path, **own | again))  # type: ignore[arg-type]
    data = read_json(tmp_path / "again" / "manifest.json")["config"]["data"]
    assert (data["date"], data["template"]) == ("2026-07-31", {"think": False})


def test_a_template_that_refuses_the_system_s_messages_has_two_ways(tmp_path: Path) -> None:
    write_chats(tmp_path, system="Be brief.")
    with pytest.raises(InputError, match=r"no system\. It takes them without .*data.system=drop .*data.system=merge"):
        run(chat_config(tmp_path, WITHOUT_SYSTEM))
    for system, expected in (("drop", "<|user|>def f"), ("merge", "<|user|>Be brief.\n\ndef f")):
        run(chat_config(tmp_path, data=chats_of(tmp_path, system=system), output_dir=str(tmp_path / system)))
        prompts = prompts_in(tmp_path / system)
        assert all(prompt.startswith(expected) for prompt in prompts)
        assert read_json(tmp_path / system / "manifest.json")["config"]["data"]["system"] == system
