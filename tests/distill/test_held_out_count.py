"""The count of what is held out is what a report will find, and is said while it can be mended."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from decode.common.checked_json import read_json
from distill.config import DataConfig, PromptConfig
from distill.corpora import Document, load_corpus
from distill.prompts.held_out_count import REPORT_PROMPTS, WINDOW, HeldOutCount, count_held_out
from distill.records.record_folder import RecordFolder
from distill.stage import run
from eval.config import LosslessConfig, PromptsConfig
from eval.prompts.held_out import held_out_prompts
from tests.distill.runs import tiny_config
from tests.tiny import tiny_tokenizer


def corpus_of(folder: Path, rows: list[dict]) -> DataConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(name="jsonl", path=str(path), heldout_share=0.3)


def chat(number: int) -> dict:
    return {"messages": [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": "Yes."}]}


def text(number: int) -> dict:
    return {"text": f"{number} " + "def value return " * (30 * (number % 3))}


@pytest.mark.parametrize("row", [chat, text])
def test_it_counts_the_prompts_that_a_report_makes(tmp_path: Path, row) -> None:  # noqa: ANN001
    data, tokenizer = corpus_of(tmp_path, [row(number) for number in range(60)]), tiny_tokenizer()
    held_out = list(load_corpus(data).documents("heldout"))
    found = count_held_out(load_corpus(data), tokenizer)
    asked = PromptsConfig()
    assert (WINDOW, REPORT_PROMPTS) == (asked.tokens, LosslessConfig().prompts)
    assert found.is_all
    assert 0 < found.documents == len(held_out)
    assert found.prompts == len(held_out_prompts(iter(held_out), tokenizer, asked, 1000, seed=0)) < REPORT_PROMPTS


def test_it_stops_where_a_report_has_enough(tmp_path: Path) -> None:
    data = corpus_of(tmp_path, [chat(number) for number in range(1000)])
    corpus = load_corpus(data)
    read = 0

    def counted():  # noqa: ANN202
        nonlocal read
        for document in corpus.read():
            read += 1
            yield document

    found = count_held_out(replace(corpus, read=counted), tiny_tokenizer())
    assert (found.prompts, found.is_all) == (REPORT_PROMPTS, False)
    assert read < 500
    assert found.line().startswith("at least 96 documents")
    assert found.warning(0.3) is None


def test_only_the_documents_that_are_read_count(tmp_path: Path) -> None:
    data = replace(corpus_of(tmp_path, [chat(number) for number in range(60)]), max_documents=20)
    corpus = load_corpus(data)
    kept = list(load_corpus(data).documents("heldout"))
    assert count_held_out(corpus, tiny_tokenizer()).documents == len(kept)
    assert len(list(islice(corpus.read(), 60))) == 60
    none = replace(corpus, config=replace(data, heldout_share=0.0))
    found = count_held_out(none, tiny_tokenizer())
    assert found == HeldOutCount(documents=0, prompts=0, is_all=True)
    assert found.warning(0.0) is None


@pytest.mark.parametrize(
    ("prompts", "share", "told", "not_told"),
    [
        (7, 0.05, "too few for a report", "wide"),
        (8, 0.05, "intervals will be wide", "too few"),
        (48, 0.05, "data.heldout_share=0.1 in place of 0.05, or more documents", "too few"),
        (11, 0.05, "data.heldout_share=0.3 in place", "0.44"),
        (95, 0.4, "later, so now use more documents", "in place of"),
    ],
)
def test_few_prompts_are_warned_of_with_what_to_do(prompts: int, share: float, told: str, not_told: str) -> None:
    warning = HeldOutCount(documents=prompts, prompts=prompts, is_all=True).warning(share)
    assert warning is not None
    assert told in warning
    assert not_told not in warning
    assert f"{prompts} of the 96" in warning
    assert HeldOutCount(documents=1, prompts=96, is_all=True).warning(share) is None


def test_a_run_says_it_before_anything_is_recorded_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    run(tiny_config(tmp_path, plan=True))
    line = next(one for one in capsys.readouterr().out.splitlines() if one.startswith("held out"))
    assert "of the 96 held-out prompts that it asks for" in caplog.text
    run(tiny_config(tmp_path, prompts=PromptConfig(tokens=6, count=1, validation_count=1)))
    kept = RecordFolder.open(tmp_path / "records").manifest.held_out
    assert kept is not None
    assert line.endswith(kept.line())
    given = {"responses": "records", "from_records": str(tmp_path / "records")}
    base = tiny_config(tmp_path, "again")
    usual = {name: type(getattr(base, name))() for name in ("data", "prompts", "sampling")}
    run(replace(base, **given, **usual))
    assert read_json(tmp_path / "again" / "manifest.json")["held_out"] == kept.model_dump()


def test_python_source_is_not_read_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what a run without data= reads, whatever its target was made for."""
    run(tiny_config(tmp_path, plan=True))
    assert "(data=jsonl)" in caplog.text
    assert "the default" not in caplog.text
    files = [Document(f"{number}.py", text(number)["text"]) for number in range(90)]
    monkeypatch.setattr("distill.corpora.configured.python_stdlib", lambda: iter(files))  # its own are large
    run(tiny_config(tmp_path, plan=True, data=DataConfig()))
    assert "(data=python_stdlib; chats or text of your own: data=jsonl" in caplog.text


def test_the_share_that_is_advised_is_another_one_and_enough() -> None:
    """Two digits of 0.0235 were 0.023 again."""
    line = HeldOutCount(documents=94, prompts=94, is_all=True).warning(0.023)
    assert line is not None
    assert "data.heldout_share=0.03 in place of 0.023" in line
