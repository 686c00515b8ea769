"""Without `data=` the prompts come from the drafts' own corpus; with it, drafts that know another are named."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from decode.common.errors import ConfigError, UserError
from decode.drafters.provenance import FILE, PROVENANCE
from distill.corpora.config import DataConfig
from distill.stage import run as distill
from eval import stage
from eval.config import EvalConfig
from eval.stage import with_own_data
from tests.commands import built
from tests.distill.runs import tiny_config as tiny_records
from tests.tiny import save_tiny_target, tiny_tokenizer
from tests.train.toy import tiny_config

CHATS = DataConfig(name="jsonl", path="chats.jsonl", messages_field="conversations", heldout_share=0.5)


def saved(folder: Path, data: DataConfig | None) -> Path:
    """What `with_own_data` reads of a run's folder."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    content = {"schema": 1, "family": "lm", "target": None, "data": None if data is None else asdict(data)}
    PROVENANCE.write(model / FILE, content)
    return folder


def config(*overrides: str) -> EvalConfig:
    cfg = built("eval", ["target.path=t", *overrides])
    assert isinstance(cfg, EvalConfig)
    return cfg


@pytest.fixture
def chat_draft(tmp_path: Path) -> str:
    return f"drafts.chats={saved(tmp_path / 'run', CHATS)}"


def test_the_first_draft_that_knows_its_corpus_decides(
    tmp_path: Path, chat_draft: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All of it: shares, fields, documents. Some drafts come from elsewhere and know none."""
    cfg = config("drafts.base=some/model", f"drafts.old={saved(tmp_path / 'old', None)}", chat_draft)
    assert cfg.data.name == "own"
    assert with_own_data(cfg).data == CHATS
    assert "held-out documents of data=jsonl data.path=chats.jsonl, the corpus of drafts.chats=" in caplog.text


def test_where_no_draft_knows_it_is_python_and_said(caplog: pytest.LogCaptureFixture) -> None:
    assert with_own_data(config("drafts.base=some/model")).data == DataConfig()
    assert "data=python_stdlib, since no draft's folder says what it was trained on" in caplog.text


def test_tasks_are_a_corpus_without_a_path_or_with_one(tmp_path: Path) -> None:
    for number, data in enumerate((DataConfig(name="tasks"), DataConfig(name="tasks", path="sources"))):
        assert with_own_data(config(f"drafts.one={saved(tmp_path / str(number), data)}")).data == data


def test_a_prompt_file_needs_no_corpus(chat_draft: str, caplog: pytest.LogCaptureFixture) -> None:
    assert with_own_data(config(chat_draft, "prompts.file=q.jsonl")).data.name == "jsonl"
    assert "prompts:" not in caplog.text


def test_what_is_set_besides_stays_set(chat_draft: str) -> None:
    """Another share is then refused, as with data=jsonl."""
    found = with_own_data(config(chat_draft, "data.max_documents=7", "data.heldout_share=0.2")).data
    assert (found.max_documents, found.heldout_share, found.path) == (7, 0.2, "chats.jsonl")


def test_another_corpus_than_a_draft_s_is_said(chat_draft: str, caplog: pytest.LogCaptureFixture) -> None:
    for override in ("data=python_stdlib", "mode=decoders"):
        caplog.clear()
        cfg = config(*(["mode=decoders"] if "mode" in override else [override]), chat_draft)
        assert with_own_data(cfg) == cfg
        assert cfg.data.name == "python_stdlib"
        assert "of data=python_stdlib, and drafts.chats=" in caplog.text
    caplog.clear()
    with_own_data(config(chat_draft, "data=jsonl", "data.path=chats.jsonl"))
    assert not caplog.text


def test_a_second_draft_s_other_corpus_is_said(
    chat_draft: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = saved(tmp_path / "other", DataConfig(name="jsonl", path="other.jsonl"))
    with_own_data(config(chat_draft, f"drafts.other={other}"))
    assert "and drafts.other=" in caplog.text
    assert "was trained on data=jsonl data.path=other.jsonl" in caplog.text


def test_families_take_the_corpus_of_their_records(tmp_path: Path) -> None:
    recorded = tiny_records(tmp_path)
    distill(recorded)
    cfg = config("mode=families", f"families.records={recorded.output_dir}")
    assert with_own_data(cfg).data == recorded.data
    missing = config("mode=families", f"families.records={tmp_path / 'none'}")
    assert with_own_data(missing).data.name == "python_stdlib"


def test_other_stages_have_no_draft_to_ask(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data=own is the corpus that a draft was trained on"):
        tiny_records(tmp_path, data=DataConfig(name="own"))
    with pytest.raises(ConfigError, match="data=own is the corpus that a draft was trained on"):
        tiny_config(tmp_path / "out", tmp_path, data={"name": "own"}, target_source="live")
    with pytest.raises(ConfigError, match="data.path=x.jsonl does not say what lies there"):
        config("drafts.d=d", "data.path=x.jsonl")


def test_a_report_without_data_reads_the_chats_of_its_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    save_tiny_target(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    chats = [{"conversations": [{"from": "human", "value": f"Question {n}"}]} for n in range(40)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    own = DataConfig("jsonl", str(file), messages_field="conversations", heldout_share=0.5, validation_share=0.3)
    draft = saved(tmp_path / "run", own) / "model"
    save_tiny_target(draft, num_layers=1)
    tokenizer.save_pretrained(draft)
    sizes = ["lossless.prompts=9", "timing.prompts=8", "timing.screening_prompts=4"]
    given = [f"target.path={tmp_path / 'target'}", f"drafts.mine={tmp_path / 'run'}", *sizes, "lossless.tokens=64"]
    stage.run(config(*given, "decode.max_new_tokens=64", "plan=true"))
    assert "8 timed, 9 checked" in capsys.readouterr().out
    assert str(file) in caplog.text
    with pytest.raises(UserError, match="was made of text split with data.heldout_share=0.5"):
        stage.run(config(*given, "data.heldout_share=0.4", "plan=true"))
