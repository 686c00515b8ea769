"""Rows of a corpus that are unusable, or longer than a sequence may be: every stage goes on without them, says how
many there are and what they lose, and refuses too many."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from decode.common.checked_json import read_json
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.models.describe import describe_model
from distill.config import DistillConfig, PromptConfig, ResponseSampling
from distill.corpora.bad_rows import BadRow, BadRows
from distill.corpora.config import DataConfig
from distill.corpora.configured import load_corpus
from distill.datastore.config import DatastoreConfig
from distill.datastore.stage import run as run_datastore
from distill.prompts.cut_answers import cut_at
from distill.prompts.drawn_prompts import draw_prompts
from distill.prompts.held_out_count import count_held_out
from distill.records.record_folder import RecordFolder
from distill.responses import Writer
from distill.sequences import text_sequences
from distill.stage import run
from eval.prompts.held_out import as_many_as
from tests.distill.chats import chat_config, chats_of
from tests.distill.runs import shard_files, tiny_config
from tests.distill.test_responses import Scripted, Stopped, chat_tokenizer, stop_at
from tests.eval.samples import config as eval_config
from tests.tiny import save_tiny_target
from train.config import TrainConfig
from train.stage import run as run_train

STRICT = (  # knows no system, and capitals in a question make it rewrite the answer before it
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content if loop.last or '?' in m.content or messages[-1].content != 'REWRITE' else 'x' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
REWRITE = {"role": "gpt", "content": "REWRITE"}
SYSTEM = {"role": "system", "content": "Be brief."}


def chat(number: int) -> dict:
    asked = {"role": "user", "content": f"Question {number}?"}
    return {"messages": [asked, {"role": "assistant", "content": f"Yes, {number} it is"}]}


ODD = {
    "empty": {"messages": []},
    "broken": "{",
    "refused": {"messages": [SYSTEM, *chat(62)["messages"]]},
    "rewritten": {"messages": [*chat(63)["messages"], {"role": "user", "content": "?"}, REWRITE]},
}
"""Those that can be read are of the training split."""


def corpus_of(folder: Path, *odd: object, name: str = "chats.jsonl", count: int = 60) -> DataConfig:
    """Chats, with the odd rows from line 4 on."""
    rows = [chat(number) for number in range(count)]
    lines = [one if isinstance(one, str) else json.dumps(one) for one in [*rows[:3], *odd, *rows[3:]]]
    (folder / name).write_text("".join(line + "\n" for line in lines))
    return DataConfig(
        name="jsonl", path=str(folder / name), validation_share=0.2, heldout_share=0.2, bad_rows=0.1
    )  # fmt: skip


def config_of(folder: Path, data: DataConfig, output: str = "records", **fields: object) -> DistillConfig:
    if not (folder / "target").exists():
        save_tiny_target(folder / "target")
        strict = chat_tokenizer()
        strict.chat_template = STRICT
        strict.save_pretrained(folder / "target")
    return tiny_config(folder, output, data=data, prompts=PromptConfig(count=None, validation_count=100), **fields)


@pytest.mark.parametrize("responses", ["corpus", "target"])
def test_a_run_goes_on_without_them_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture, responses: str
) -> None:
    """Under responses=target a rewritten answer is no fault: it is the target's own that is recorded."""
    config = config_of(tmp_path, corpus_of(tmp_path, *ODD.values()), responses=responses)
    bad = 4 if responses == "corpus" else 3
    run(replace(config, plan=True))
    (line,) = (one for one in capsys.readouterr().out.splitlines() if one.startswith("left out"))
    assert f"{bad} of 64 rows (1 as " in line
    for place, told in ((4, "messages must be a list"), (5, "no valid JSON"), (6, "refuses these messages")):
        assert f"chats.jsonl, line {place}: " in line
        assert told in line
    assert ("line 7: the chat template rewrites" in line) == (responses == "corpus")
    run(config)
    kept = RecordFolder.open(config.output_dir).manifest.bad_rows
    assert kept is not None
    assert line.endswith(kept.line())
    assert caplog.text.count("left out of the corpus: ") == 1


def test_the_others_are_what_they_would_be(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = STRICT
    blank = [""] * len(ODD)  # a blank line is no row, and moves no other
    drawn = [
        list(draw_prompts(load_corpus(data), tokenizer, config_of(tmp_path, data, responses="corpus")))
        for data in (corpus_of(tmp_path, *ODD.values()), corpus_of(tmp_path, *blank))
    ]
    assert len(drawn[0]) > 20
    assert drawn[0] == drawn[1]


@pytest.mark.slow
def test_a_run_that_goes_on_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = corpus_of(tmp_path, *ODD.values())
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        with pytest.raises(Stopped):
            run(config_of(tmp_path, data))
    run(config_of(tmp_path, data, resume="auto"))
    run(config_of(tmp_path, data, "whole"))
    assert shard_files(tmp_path / "records") == shard_files(tmp_path / "whole")
    ours, theirs = (read_json(tmp_path / name / "manifest.json")["bad_rows"] for name in ("records", "whole"))
    assert ours == theirs
    assert ours["rows"] == 64


def read_by_distill(folder: Path, data: DataConfig) -> None:
    run(config_of(folder, data, plan=True, responses="corpus"))


def read_by_training(folder: Path, data: DataConfig) -> None:
    target = str(config_of(folder, data).target.path)
    run_train(
        TrainConfig(target=ModelConfig(path=target), data=data, target_source="live", plan=True, batch_size=1,
                    sequence_length=64, steps=1, output_dir=str(folder / "draft"))  # type: ignore[arg-type]
    )  # fmt: skip


def read_by_a_datastore(folder: Path, data: DataConfig) -> None:
    target = str(config_of(folder, data).target.path)
    run_datastore(
        DatastoreConfig(target=ModelConfig(path=target), data=data, output_dir=str(folder / f"store{data.bad_rows}"))
    )


def read_by_a_report(folder: Path, data: DataConfig) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = STRICT
    prompts = as_many_as(replace(eval_config(), data=data), tokenizer, 100)
    assert {str(tokenizer.decode(list(one.ids)))[:15] for one in prompts} == {"[user]Question "}


@pytest.mark.parametrize("read", [read_by_distill, read_by_training, read_by_a_datastore, read_by_a_report])
def test_every_stage_leaves_them_out_and_refuses_too_many(
    tmp_path: Path, read: Callable[[Path, DataConfig], None], caplog: pytest.LogCaptureFixture
) -> None:
    data = corpus_of(tmp_path, *[ODD["empty"], ODD["broken"], ODD["refused"]])
    read(tmp_path, data)
    (told,) = (one.message for one in caplog.records if one.levelname == "WARNING" and "left out" in one.message)
    assert f"{data.path}, line 4: messages must be a list" in told
    assert ("line 6: the chat template refuses" in told) == (read is not read_by_a_report)  # which reads no such split
    with pytest.raises(InputError, match=r"of 63 rows read cannot be used, more than data\.bad_rows=0"):
        read(tmp_path, replace(data, bad_rows=0.01))


@pytest.mark.parametrize(("share", "read"), [(0.05, 20_000), (0.0, 1_000)])
def test_a_corpus_is_read_as_far_as_it_takes_to_know_the_share(share: float, read: int) -> None:
    """A thousand bad rows at its head are few among sixty thousand."""

    def counted(share: float, are_bad: int) -> BadRows:
        found = BadRows("chats.jsonl", share)
        for row in range(60_000):
            found.rows += 1
            if row < are_bad:
                found.add(BadRow(f"row {row}", "no text"))
        return found

    with pytest.raises(InputError, match=f"{read:,} of {read:,} rows read cannot be used"):
        counted(share, 60_000)
    assert counted(0.05, 1_000).report().left_out == 1_000


def test_rows_that_a_template_refuses_are_too_many_as_well(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    corpus = load_corpus(corpus_of(tmp_path))
    with pytest.raises(InputError, match=r"\d+ as .*chats.jsonl, line \d+: the chat template refuses .*: no\)"):
        text_sequences(corpus, tokenizer, "train", 64)
    with pytest.raises(InputError, match="the chat template refuses"):
        list(draw_prompts(load_corpus(corpus.config), tokenizer, config_of(tmp_path, corpus.config)))


def test_what_is_held_out_is_counted_without_them(tmp_path: Path) -> None:
    corpora = [load_corpus(corpus_of(tmp_path, *odd)) for odd in ((), (ODD["empty"], ODD["broken"]))]
    one, other = (count_held_out(corpus, chat_tokenizer()) for corpus in corpora)
    assert one == other
    assert one.prompts > 5


CALLING = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOLD = [
    ("human", "Rain?"), ("function_call", '{"name": "look", "arguments": {}}'), ("observation", "Heavy"),
    ("gpt", "gone"), ("human", "Thanks"), ("gpt", "gone too"),
]  # fmt: skip


def test_the_target_answers_by_what_the_corpus_s_tools_found(tmp_path: Path) -> None:
    """A call stays as it is, since its result follows; the answers are the target's."""
    row = {"tools": '[{"name": "look"}]', "conversations": [{"from": who, "value": said} for who, said in TOLD]}
    (tmp_path / "calls.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(name="jsonl", path=str(tmp_path / "calls.jsonl"), validation_share=0, heldout_share=0)
    config = config_of(tmp_path, data)
    config.prompts.validation_count = 0
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = CALLING
    prompts = list(draw_prompts(load_corpus(data), tokenizer, config))
    sampler = Scripted(tokenizer("Wet")["input_ids"])  # type: ignore[arg-type]
    Writer(config, tokenizer, sampler, 1000, prompts).write(0, 1)
    first = "<tool>look</tool>[user]Rain?[assistant]<call>look</call>[tool]Heavy[assistant]"
    asked = [str(tokenizer.decode(ids)) for batch, _, _ in sampler.asked for ids in batch]
    assert asked == [first, f"{first}Wet[user]Thanks[assistant]"]


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
