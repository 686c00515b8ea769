"""The chats that a report asks by are written as those that its drafts learned from, or it does not begin."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import ConfigError, InputError
from decode.config import ModelConfig
from decode.drafters.provenance import FILE, PROVENANCE
from decode.models.describe import describe_model
from decode.sampling import own_settings
from distill.corpora.config import DataConfig
from eval import stage
from eval.config import EvalConfig
from eval.inputs import check_datastore
from eval.modes import report
from eval.prompts.held_out import PromptSets
from tests.decode.untrained.test_lookup import write_datastore
from tests.distill.chats import DATED, chats_of, on_day, set_template
from tests.eval.test_own_data import config
from tests.tiny import save_tiny_target, tiny_tokenizer

HASH = "a" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    set_template(tmp_path / "target", DATED)
    return tmp_path


def save_draft(folder: Path, data: DataConfig, template: str | None = None) -> None:
    """A draft that learned from `data`, by the chat template with this hash, in place of the target's."""
    target = describe_model(ModelConfig(path=str(folder / "target")))
    known = {"path": target.path, "fingerprint": target.fingerprint, "vocab_size": target.vocab_size}
    known["chat_template_hash"] = template or target.chat_template_hash
    save_tiny_target(folder / "draft", num_layers=1)
    tiny_tokenizer().save_pretrained(folder / "draft")
    PROVENANCE.write(folder / "draft" / FILE, {"schema": 1, "family": "lm", "target": known, "data": asdict(data)})


def asked(folder: Path, *overrides: str) -> EvalConfig:
    sizes = ["lossless.prompts=2", "timing.prompts=2", "timing.screening_prompts=1", "lossless.tokens=8"]
    given = [f"target.path={folder / 'target'}", f"drafts.mine={folder / 'draft'}", "decode.max_new_tokens=8"]
    return config(*given, *sizes, f"output_dir={folder / 'report'}", "plan=true", *overrides)


def first_prompt(cfg: EvalConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    """The text of what a report would ask first."""
    seen: list[PromptSets] = []
    load = report.load_prompts

    def kept(*given: Any) -> PromptSets:
        seen.append(load(*given))
        return seen[-1]

    monkeypatch.setattr(report, "load_prompts", kept)
    stage.run(cfg)
    return str(tiny_tokenizer().decode(list(seen[-1].reported[0].ids)))


def test_prompts_are_written_as_the_draft_s_chats_were(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their day too, whatever today is."""
    data = chats_of(folder, template={"think": False}, date="2026-02-03")
    save_draft(folder, data)
    on_day("2026-08-01", monkeypatch)
    text = first_prompt(asked(folder), monkeypatch)
    assert text.startswith("03 Feb 2026\n<|user|>def f")
    assert text.endswith("<|assistant|><think></think>")


def test_questions_of_a_file_are_written_so_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_draft(folder, chats_of(folder, template={"think": False}, date="2026-02-03"))
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps({"question_id": n, "turns": [f"Question {n}?"]}) + "\n" for n in range(9)))
    text = first_prompt(asked(folder, f"prompts.file={file}"), monkeypatch)
    assert text.startswith("03 Feb 2026\n<|user|>Question")
    assert text.endswith("<|assistant|><think></think>")


def test_a_report_keeps_the_day_on_which_it_began(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_draft(folder, chats_of(folder))
    (folder / "report").mkdir()
    told = {"schema": 1, "stage": "eval", "config": {"data": {"date": "2026-07-31"}}, "started": "2026-07-31T23:00"}
    (folder / "report" / "run.json").write_text(json.dumps(told))
    on_day("2026-08-01", monkeypatch)
    assert first_prompt(asked(folder), monkeypatch).startswith("31 Jul 2026\n")


@pytest.mark.parametrize(
    ("learned", "override", "told"),
    [
        (
            {"template": {"think": False}},
            "data.template={think: true}",
            "={'think': False}, .*={'think': True}",
        ),
        ({"system": "merge"}, "data.system=drop", "data.system=merge, .* data.system=drop"),
        ({}, "data.system=drop", "data.system=None, .* data.system=drop"),
    ],
)
def test_other_settings_than_the_draft_s_are_refused(
    folder: Path, learned: dict[str, Any], override: str, told: str
) -> None:
    save_draft(folder, chats_of(folder, **learned))
    with pytest.raises(InputError, match=told):
        stage.run(asked(folder, override))


def test_a_draft_of_another_chat_template_is_refused(folder: Path) -> None:
    save_draft(folder, chats_of(folder), template=HASH)
    here = describe_model(asked(folder).target).chat_template_hash
    with pytest.raises(InputError, match=f"drafts.mine=.* with hash {HASH}, and that of .* has {here}"):
        stage.run(asked(folder))


def test_a_draft_of_plain_text_has_no_template_to_compare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_draft(folder, DataConfig(), template=HASH)
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps({"question_id": n, "turns": [f"Question {n}?"]}) + "\n" for n in range(9)))
    found = asked(folder, f"prompts.file={file}", "data.template={think: false}")
    assert first_prompt(found, monkeypatch).endswith("<|assistant|><think></think>")


def test_a_variable_that_the_template_never_reads_is_refused(folder: Path) -> None:
    save_draft(folder, chats_of(folder))
    own = chats_of(folder)
    given = ["data=jsonl", f"data.path={own.path}", "data.validation_share=0.2", "data.heldout_share=0.2"]
    (folder / "draft" / FILE).unlink()
    with pytest.raises(ConfigError, match=r"sets thinks, which the chat template .* it reads think"):
        stage.run(asked(folder, *given, "data.template={thinks: false}"))


def test_a_datastore_of_other_chats_is_refused(folder: Path) -> None:
    cfg = replace(asked(folder), data=chats_of(folder))
    target = describe_model(cfg.target)
    others = [(cfg.data, HASH, f"the datastore .* hash {HASH}"), (replace(cfg.data, system="drop"), None, "=drop")]
    for number, (data, template, told) in enumerate(others):
        store = write_datastore(folder / str(number), data=asdict(data), chat_template_hash=template)
        with pytest.raises(InputError, match=told):
            check_datastore(cfg, "retrieval", str(store), target)
    check_datastore(cfg, "retrieval", str(write_datastore(folder / "old")), target)


def test_a_report_says_once_what_the_target_s_own_settings_ask_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_draft(folder, chats_of(folder))
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    file = folder / "target" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    for given in (["temperatures=[0.0,0.6]", "decode.top_k=20"], [], []):
        monkeypatch.setattr(own_settings, "_told", set())
        caplog.clear()
        stage.run(asked(folder, *given))
        lines = [one.getMessage() for one in caplog.records if "generation_config" in one.getMessage()]
        assert len(lines) == (0 if given else 1)
    assert lines[0].endswith("To go by them: 'temperatures=[0.6]' decode.top_k=20")
