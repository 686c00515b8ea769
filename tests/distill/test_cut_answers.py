"""Answers of a corpus that are longer than a sequence may be: how many there are, and what they lose, is told."""

import json
from pathlib import Path

import pytest

from decode.common.checked_json import read_json
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.models.load import describe_model
from distill.config import DataConfig, PromptConfig, ResponseSampling
from distill.corpora import load_corpus
from distill.prompts.cut_answers import cut_at
from distill.records.record_folder import RecordFolder
from distill.sequences import text_sequences
from distill.stage import run
from tests.distill.chats import chat_config, chats_of
from tests.distill.runs import tiny_config

POSITIONS = 256  # of the tiny target
LONG, SHORT = "x = 1 + 2 * 3\n" * 60, "x = 1"


def write_chats(folder: Path, *answers: str) -> None:
    """Thirty chats with these answers in turn."""
    says = [
        [
            message
            for number, answer in enumerate(answers)
            for message in (("user", f"q{n}.{number}"), ("assistant", answer))
        ]
        for n in range(30)
    ]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in says]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("mask", "limit", "found"),
    [
        ("..111..11", 9, (0, 0)),
        ("..111..11", 8, (1, 1)),
        ("..111..11", 7, (1, 2)),
        ("..111..11", 4, (2, 3)),
        ("..111..11", 2, (2, 5)),
        ("..111....", 5, (0, 0)),
    ],
)
def test_answers_that_reach_beyond_the_limit_are_counted(mask: str, limit: int, found: tuple[int, int]) -> None:
    assert cut_at(limit, [one == "1" for one in mask]) == found


def test_what_a_run_cuts_is_in_its_plan_its_summary_and_its_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_chats(tmp_path, SHORT, LONG)
    run(chat_config(tmp_path, responses="corpus", plan=True))
    cut = read_cut(capsys.readouterr().out)
    run(chat_config(tmp_path, responses="corpus"))
    records, manifest = RecordFolder.open(tmp_path / "records"), read_json(tmp_path / "records" / "manifest.json")
    assert manifest["finish_reasons"] == {"length": 13}
    assert set(records.lengths) == {POSITIONS}
    assert manifest["cut"]["answers"] == 13
    assert manifest["cut"]["limit"] == POSITIONS
    tokenizer = describe_model(ModelConfig(path=str(tmp_path / "target"))).tokenizer
    assert tokenizer is not None
    whole = sum(len(tokenizer(text)["input_ids"]) + len(["<eos>"]) for text in (SHORT, LONG))  # type: ignore[arg-type]
    assert manifest["counts"]["learned_tokens"] + manifest["cut"]["tokens"] == 13 * whole
    assert cut == f"13 answers reach beyond 256 tokens and lose {manifest['cut']['tokens']:,} tokens there"
    assert cut in caplog.text
    again = {"responses": "records", "from_records": str(tmp_path / "records"), "output_dir": str(tmp_path / "again")}
    own = {"data": DataConfig(), "prompts": PromptConfig(), "sampling": ResponseSampling()}
    run(chat_config(tmp_path, **own | again))  # type: ignore[arg-type]
    assert read_json(tmp_path / "again" / "manifest.json")["cut"] == manifest["cut"]


def read_cut(plan: str) -> str:
    return next(line.removeprefix("cut").strip() for line in plan.splitlines() if line.startswith("cut"))


def test_nothing_is_said_where_nothing_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_chats(tmp_path, SHORT)
    run(chat_config(tmp_path, responses="corpus", plan=True))
    assert "\ncut " not in capsys.readouterr().out
    run(chat_config(tmp_path, responses="corpus"))
    manifest = read_json(tmp_path / "records" / "manifest.json")
    assert manifest["cut"] == {"answers": 0, "tokens": 0, "limit": POSITIONS}
    assert manifest["finish_reasons"] == {"corpus": 13}
    run(chat_config(tmp_path, output_dir=str(tmp_path / "written")))
    assert read_json(tmp_path / "written" / "manifest.json")["cut"] is None


def test_chats_of_which_nothing_is_left_are_left_out_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [[("user", LONG + str(n)), ("assistant", SHORT)] for n in range(20)]
    rows += [[("user", str(n)), ("assistant", SHORT)] for n in range(20)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    everything = PromptConfig(count=None, validation_count=20)
    run(chat_config(tmp_path, responses="corpus", plan=True, prompts=everything))
    told = capsys.readouterr().out
    run(chat_config(tmp_path, responses="corpus", prompts=everything))
    manifest = read_json(tmp_path / "records" / "manifest.json")
    assert f"{manifest['cut']['answers']} of them longer than the context and left out" in told
    assert f"tokens, at most       {manifest['counts']['tokens']:,}," in told
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats[:20]))
    with pytest.raises(InputError, match="leaves room for one token of an answer in the 256 positions"):
        run(chat_config(tmp_path, responses="corpus", output_dir=str(tmp_path / "none")))


def test_windows_of_plain_text_are_counted_too(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": f"# {n}\n{LONG}"}) + "\n" for n in range(40)))
    run(tiny_config(tmp_path, responses="corpus", sampling=ResponseSampling(max_new_tokens=300)))
    manifest = read_json(tmp_path / "records" / "manifest.json")
    assert manifest["cut"] == {"answers": 13, "tokens": 13 * (306 - POSITIONS), "limit": POSITIONS}
    assert manifest["finish_reasons"] == {"length": 13}


def test_training_on_chats_says_what_it_cuts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_chats(tmp_path, SHORT, LONG)
    run(chat_config(tmp_path, responses="corpus", plan=True))  # makes the target
    tokenizer = describe_model(ModelConfig(path=str(tmp_path / "target"))).tokenizer
    assert tokenizer is not None
    found = text_sequences(load_corpus(chats_of(tmp_path)), tokenizer, "train", 100)
    assert set(found.lengths) == {100}
    assert f"train split: {len(found)} answers reach beyond 100 tokens and lose" in caplog.text
