"""Corpora: what is read, how it is split, and what a broken one says."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from decode.common.errors import InputError
from distill.config import DistillConfig
from distill.corpora.config import DataConfig
from distill.corpora.configured import load_corpus
from distill.corpora.corpus import Document, split_of
from distill.corpora.messages import read_message
from tests.commands import built

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ROWS = [{"text": f"document number {n}", "name": f"d{n}", "category": "code"} for n in range(40)]


def everything(config: DataConfig) -> list[Document]:
    corpus = load_corpus(config)
    return [document for split in ("train", "validation", "heldout") for document in corpus.documents(split)]


def wide(**fields: object) -> DataConfig:
    """Shares that put some of 40 documents into every split."""
    return DataConfig(**{"validation_share": 0.2, "heldout_share": 0.2} | fields)  # type: ignore[arg-type]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_standard_library_is_split_by_file() -> None:
    corpus = load_corpus(DataConfig())
    ids = {split: {d.id for d in corpus.documents(split)} for split in ("train", "validation", "heldout")}
    assert "json/decoder.py" in set.union(*ids.values())
    assert not any("/tests/" in name or name.startswith("test/") for name in ids["train"])
    assert not ids["train"] & ids["heldout"]
    assert not ids["train"] & ids["validation"]
    assert len(ids["train"]) > 10 * len(ids["heldout"]) > 0


def test_a_document_keeps_its_split_whatever_else_is_read(tmp_path: Path) -> None:
    config = wide(name="jsonl", path=write_jsonl(tmp_path / "a.jsonl", ROWS), id_field="name")
    reversed_config = wide(name="jsonl", path=write_jsonl(tmp_path / "b.jsonl", ROWS[::-1]), id_field="name")
    for split in ("train", "validation", "heldout"):
        one = {d.id for d in load_corpus(config).documents(split)}
        assert one == {d.id for d in load_corpus(reversed_config).documents(split)}


def test_the_line_between_splits_is_where_it_always_was() -> None:
    """By the first 8 bytes of the SHA-256 of "split", a separator and the text, as a share of 2 ** 64: documents 2
    (0.056), 7 (0.087), 11 (0.149) and 10 (0.174) lie below 0.2, and 9 (0.217), 4 (0.241), 8 (0.265) and 1 (0.278)
    below 0.4. Another line would test on what older drafts were trained on."""
    config = wide(name="jsonl", path="unused")
    split = [split_of(Document("x", f"document number {n}"), config) for n in range(12)]
    assert [n for n in range(12) if split[n] == "heldout"] == [2, 7, 10, 11]
    assert [n for n in range(12) if split[n] == "validation"] == [1, 4, 8, 9]
    around = [split_of(Document("y", f"\n document number {n}  "), config) for n in range(12)]
    assert around == split  # blanks around a text make no other text of it


def test_equal_texts_fall_into_one_split_whatever_their_ids(tmp_path: Path) -> None:
    """Web data repeats itself: split by row number, 43 of 43 held-out texts of such a file were trained on as well."""
    rows = [{"text": f"text number {i % 100}"} for i in range(1000)]
    corpus = load_corpus(wide(name="jsonl", path=write_jsonl(tmp_path / "a.jsonl", rows)))
    texts = {split: {d.text for d in corpus.documents(split)} for split in ("train", "validation", "heldout")}
    assert all(texts.values())
    assert not texts["train"] & texts["heldout"]
    assert not texts["validation"] & texts["heldout"]


def test_conversations_are_split_by_their_first_question() -> None:
    config = wide(name="jsonl", path="unused")
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": "Why?"}
    other = {"role": "user", "content": "How?"}
    splits = {split_of(Document("a", messages=[system, {**other, "content": f"{i}?"}]), config) for i in range(50)}
    assert len(splits) == 3  # an opening that all conversations share does not put them into one split
    ours = [Document(name, messages=[*first, question, other]) for name, first in (("x", []), ("y", [system]))]
    assert split_of(ours[0], config) == split_of(ours[1], config)


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    import datasets

    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "builder").mkdir()
    write_jsonl(tmp_path / "builder" / "train.jsonl", ROWS)
    expected = [(row["name"], row["text"], "code") for row in ROWS]
    kinds = [("jsonl", "rows.jsonl"), ("parquet", "rows.parquet"), ("dataset", "saved"), ("dataset", "splits")]
    kinds += [("dataset", "builder"), ("hub", "builder")]
    for name, path in kinds:
        for streaming in (False, True):
            config = wide(name=name, path=str(tmp_path / path), id_field="name", streaming=streaming)
            found = sorted((d.id, d.text, d.category) for d in everything(config))
            assert found == sorted(expected), (name, path)  # type: ignore[type-var]


def test_a_split_is_chosen_by_name_and_ultrachat_s_needs_none(tmp_path: Path) -> None:
    import datasets

    one, two = datasets.Dataset.from_list(ROWS[:20]), datasets.Dataset.from_list(ROWS[20:])
    datasets.DatasetDict({"test_sft": one, "train_sft": two}).save_to_disk(str(tmp_path / "chat"))
    config = wide(name="dataset", path=str(tmp_path / "chat"), id_field="name", validation_share=0.3)
    assert {d.id for d in load_corpus(config).documents("train")} <= {row["name"] for row in ROWS[20:]}
    config.hub_split = "nonsense"
    with pytest.raises(InputError, match="it has test_sft, train_sft"):
        everything(config)


def test_messages_are_read_in_both_layouts(tmp_path: Path) -> None:
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    rows = [{"messages": CHAT, "text": "ignored"} for _ in range(20)] + [{"messages": sharegpt} for _ in range(20)]
    config = DataConfig(
        name="jsonl", path=write_jsonl(tmp_path / "chat.jsonl", rows), validation_share=0, heldout_share=0
    )
    documents = list(load_corpus(config).documents("train"))
    assert len(documents) == 40
    assert all(document.messages == CHAT and document.text is None for document in documents)


def test_sharegpts_own_field_is_read_unless_another_one_is_named(tmp_path: Path) -> None:
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    path = write_jsonl(tmp_path / "chats.jsonl", [{"conversations": sharegpt}])
    whole = {"name": "jsonl", "path": path, "validation_share": 0, "heldout_share": 0}
    assert [one.messages for one in load_corpus(wide(**whole)).documents("train")] == [CHAT]
    text = write_jsonl(tmp_path / "text.jsonl", [{"text": "a text", "conversations": 3}])
    assert [one.text for one in load_corpus(wide(**whole | {"path": text})).documents("train")] == ["a text"]
    with pytest.raises(InputError, match="its fields are 'conversations'"):
        list(load_corpus(wide(**whole, messages_field="chat")).documents("train"))


def test_text_folders_and_files(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    (tmp_path / "blank.txt").write_text("  \n")
    assert len(everything(wide(name="text", path=str(tmp_path)))) == 30
    single = DataConfig(name="text", path=str(tmp_path / "3.txt"), validation_share=0, heldout_share=0)
    assert [d.id for d in load_corpus(single).documents("train")] == ["3.txt"]


def test_max_documents_stops_before_the_split(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    found = everything(wide(name="jsonl", path=path, max_documents=30))
    assert {document.text for document in found} == {row["text"] for row in ROWS[:30]}


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Hi"}
ANSWERED = {"role": "assistant", "content": "Hello"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
FOUND = {"role": "tool", "content": "Sunny"}


def turn(speaker: str, said: Any = "x", role: str = "from", content: str = "value") -> dict[str, Any]:
    return {role: speaker, content: said}


@pytest.mark.parametrize(
    ("names", "role"),
    [
        ("user human Human USER prompter", "user"),
        ("assistant Assistant gpt GPT chatgpt bing bard model ai bot", "assistant"),
        ("system System developer", "system"),
        ("tool function observation", "tool"),
    ],
)
@pytest.mark.parametrize(("says", "said"), [("role", "content"), ("from", "value"), ("speaker", "text")])
def test_speakers_are_the_template_s_whatever_they_are_called(names: str, role: str, says: str, said: str) -> None:
    for name in names.split():
        assert read_message({says: f" {name}", said: "x"}, "here") == {"role": role, "content": "x"}, name


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [turn("human", "Hi"), turn("gpt", "Hello")]}, CHAT),
        ({"messages": json.dumps(CHAT)}, CHAT),
        ({"messages": [json.dumps(one) for one in CHAT]}, CHAT),
        ({"messages": {"role": ["user", "assistant"], "content": ["Hi", "Hello"]}}, CHAT),
        ({"conversation": CHAT}, CHAT),
        ({"dialog": [turn("User", "Hi", "speaker", "text"), turn("Bot", "Hello", "speaker", "text")]}, CHAT),
        ({"messages": CHAT, "system": "Be brief."}, [SYSTEM, *CHAT]),
        ({"conversations": CHAT, "system_prompt": "Be brief."}, [SYSTEM, *CHAT]),
        ({"messages": CHAT, "system": "", "tools": "[]"}, CHAT),
        ({"messages": CHAT, "tools": [TOOL]}, [ASKED | {"tools": [TOOL]}, ANSWERED]),
        ({"messages": CHAT, "tools": json.dumps([TOOL["function"]])}, [ASKED | {"tools": [TOOL]}, ANSWERED]),
        ({"messages": CHAT, "tools": [json.dumps(TOOL)]}, [ASKED | {"tools": [TOOL]}, ANSWERED]),
        (
            {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, FOUND, ANSWERED]},
            [ASKED, CALLED, FOUND, ANSWERED],
        ),
        (
            {"conversations": [
                turn("human", "Hi"),
                turn("function_call", '{"name": "weather", "arguments": {"city": "Paris"}}'),
                turn("observation", "Sunny"),
                turn("gpt", "Hello"),
            ]},
            [ASKED, CALLED, FOUND, ANSWERED],
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "tool_calls": json.dumps([
                {"function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
            ])}, FOUND, ANSWERED]},
            [ASKED, CALLED, FOUND, ANSWERED],
        ),
        (
            {"messages": [ASKED, ANSWERED | {"reasoning_content": "A greeting."}]},
            [ASKED, ANSWERED | {"reasoning_content": "A greeting."}],
        ),
        (
            {"messages": [ASKED, ANSWERED | {"thinking": "A greeting."}]},
            [ASKED, ANSWERED | {"reasoning_content": "A greeting."}],
        ),
        (
            {"messages": [turn("user", [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]), ANSWERED]},
            CHAT,
        ),
        # a conversation that was cut begins with an answer; an empty last one is a place to write it
        ({"id": "QWJhYvA_1", "conversations": [turn("gpt", ""), turn("human", "Hi"), turn("gpt", "Hello")]}, CHAT),
        ({"messages": [SYSTEM, ANSWERED, *CHAT]}, [SYSTEM, *CHAT]),
        ({"messages": [*CHAT, ASKED, turn("assistant", "")]}, [*CHAT, ASKED]),
        ({"messages": CHAT, "images": []}, CHAT),
    ],
)  # fmt: skip
def test_what_a_row_says_becomes_messages(row: dict, expected: list[dict], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    (found,) = load_corpus(DataConfig(name="jsonl", path=path, validation_share=0, heldout_share=0)).documents("train")
    assert found.messages == expected


BAD = {
    "no field": {"body": "x"},
    "an empty list": {"messages": []},
    "the assistant alone": {"conversations": [turn("gpt"), turn("gpt")]},
    "no question": {"messages": [{"role": "tool", "content": "x"}]},
    "an empty question": {"conversations": [turn("human", " "), turn("gpt")]},
    "an empty answer": {"messages": [ASKED, turn("gpt", ""), ASKED, ANSWERED]},
    "no speaker": {"messages": [{"content": "x"}]},
    "an unknown speaker": {"messages": [turn("narrator"), turn("gpt")]},
    "a number": {"messages": [{"role": "user", "content": 3}]},
    "an image": {"messages": [turn("user", [{"type": "text", "text": "What?"}, {"type": "image_url"}]), ANSWERED]},
    "a column of images": {"messages": CHAT, "images": ["a.png"]},
    "two systems": {"messages": [SYSTEM, *CHAT], "system": "Be kind."},
    "broken tools": {"messages": CHAT, "tools": "[{"},
    "a call of nothing": {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"id": "x"}]}]},
    "text for a call": {"conversations": [turn("human"), turn("function_call", "weather in Paris")]},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_row_is_left_out_and_told(bad: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, ANSWERED]} for n in range(20)]
    config = wide(name="jsonl", path=write_jsonl(tmp_path / "a.jsonl", [*rows[:9], bad, *rows[9:]]))
    corpus = load_corpus(config)
    found = {one.id: one for split in ("train", "validation", "heldout") for one in corpus.documents(split)}
    count = corpus.bad.report()
    (kind,) = count.reasons.values()
    assert (count.rows, count.left_out, kind.rows) == (21, 1, 1)
    assert kind.example.startswith(f"{config.path}, line 10")
    assert f"left out 1 of 21 rows (1 as {config.path}, line 10" in caplog.text
    good = wide(name="jsonl", path=write_jsonl(tmp_path / "b.jsonl", [*rows[:9], rows[0], *rows[9:]]))
    for one in everything(good):  # the others are where they would be without it
        name = one.id.replace("b.jsonl", "a.jsonl")
        assert name == "a.jsonl:10" or split_of(found[name], config) == split_of(one, config)
    with pytest.raises(InputError, match="1 of 21 rows read cannot be used, more than data.bad_rows=0.*, line 10"):
        everything(replace(config, bad_rows=0.0))


def test_kinds_of_bad_rows_are_counted_and_too_many_refused(tmp_path: Path) -> None:
    rows = [{"text": f"{n}"} for n in range(16)]
    bad = [{"messages": []}, {"text": 1}, {"messages": {}}, {"text": None}]
    path = write_jsonl(
        tmp_path / "a.jsonl", [row for group in zip(*[iter(rows)] * 4, bad, strict=True) for row in group]
    )
    with pytest.raises(InputError) as refused:
        everything(wide(name="jsonl", path=path, bad_rows=0.19))
    told = str(refused.value)
    assert "4 of 20 rows read cannot be used, more than data.bad_rows=0.19" in told
    assert f"(2 as {path}, line 5: messages must be a list of at least one message, and this is []; 2 as" in told
    assert told.endswith("data.bad_rows=0.2")
    assert len(everything(wide(name="jsonl", path=path, bad_rows=0.2))) == 16


def test_a_corpus_of_nothing_else_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": []}] * 2100)
    with pytest.raises(InputError, match="2,000 of 2,000 rows read"):
        everything(wide(name="jsonl", path=path, bad_rows=0.5))


@pytest.mark.slow
def test_an_array_and_gzip_are_read_whatever_the_preset(tmp_path: Path) -> None:
    rows = [{"conversations": CHAT, "id": f"{n}"} for n in range(3)]
    for name, text in (("flat", json.dumps(rows)), ("indented", "\ufeff\n" + json.dumps(rows, indent=2) + "\n")):
        (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
        (tmp_path / f"{name}.json.gz").write_bytes(gzip.compress(text.encode()))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write_jsonl(tmp_path / "first.jsonl", [[1], *rows])  # type: ignore[list-item]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row | {"conversations": json.dumps(CHAT)} for row in rows]), tmp_path / "a.parquet"
    )
    for file in sorted(tmp_path.iterdir()):
        for preset in ("jsonl", "parquet", "dataset", "sharegpt"):
            shares = ["data.validation_share=0", "data.heldout_share=0", "data.bad_rows=0.5", "data.id_field=id"]
            data = _distill(f"data={preset}", f"data.path={file}", *shares).data
            found = [(one.id, one.messages) for one in load_corpus(data).documents("train")]
            assert found == [(f"{n}", CHAT) for n in range(3)], (file.name, preset)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.json", b'[{"text": "a"}, {"text": "b"', "a.json, row 2: no valid JSON .* Write or copy"),
        ("a.json", b'[{"text": "a"}]\n\n[{"text":\n "b"}]', "a.json"),
        ("a.json", b'[\n{"text": "a"}]\n x', "more text behind the end of the array"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 50, mtime=0)[:-9], "a.jsonl.gz: damaged"),
        ("a.jsonl.gz", b'{"text": "a"}', "a.jsonl.gz: damaged"),
    ],
)
def test_a_file_that_cannot_be_read_to_its_end_is_refused(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=told):
        everything(DataConfig(name="jsonl", path=str(tmp_path / name), bad_rows=0.5))


def test_a_table_s_nulls_are_no_part_of_a_row(tmp_path: Path) -> None:
    """Parquet gives every object the fields of all of them."""
    rows = [{"messages": CHAT, "tools": None}, {"messages": [ASKED, CALLED, FOUND, ANSWERED], "tools": [TOOL]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = DataConfig(name="parquet", path=str(tmp_path / "a.parquet"), validation_share=0, heldout_share=0)
    plain, calling = (one.messages for one in load_corpus(config).documents("train"))
    assert plain == CHAT
    assert calling == [ASKED | {"tools": [TOOL]}, CALLED, FOUND, ANSWERED]


def test_a_text_file_that_is_none_is_a_bad_row_of_its_folder(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    for name in ("text", "tasks"):
        corpus = load_corpus(wide(name=name, path=str(tmp_path)))
        assert len(list(corpus.everything())) == (20 if name == "text" else 0)  # a line is too short for a task
        assert corpus.bad.count().left_out == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no document with text"),
        (b'{"text": "a"}\n{"text": "b"\n', "a.jsonl, line 2: no valid JSON"),
        (b'{"text": "a"}\n\n[1]\n', "a.jsonl, line 3: a JSON object is wanted"),
        (b'{"text": "a"}\n{"body": "b"}\n', "a.jsonl, line 2: neither .*its fields are 'body'"),
        (b'{"text": 3}\n', "line 1: neither .*int, not text"),
        (b'{"text": "\xff"}\n', "line 1: not UTF-8"),
        (b'{"messages": []}\n', "line 1: messages must be a list"),
        (b'{"messages": [{"role": "user"}]}\n', "line 1, message 1: none of content, value, text says"),
        (b'{"messages": ["hi"]}\n', "line 1, message 1: a message is an object"),
        (
            b'{"messages": [{"from": ["x"], "value": "y"}]}\n',
            "line 1, message 1: from must be text, and this is \\['x'\\]",
        ),
        (b'{"messages": [{"from": "narrator", "value": "y"}]}\n', "from names no speaker that is known, and is 'narr"),
        (b'{"messages": [{"value": "y"}]}\n', "none of role, from, speaker says who speaks; its fields are 'value'"),
        (b'{"conversations": [{"from": "human", "value": 3}]}\n', "message 1: value must be text, and this is 3"),
        (b'{"messages": "hi"}\n', "line 1: messages is text that is no JSON"),
        (b'{"text": "a"}\n{"text": "b \\ud83d"}\n', r"line 2: character 3 is \\ud83d, half of a pair"),
        (b'{"messages": [{"role": "user", "content": "\\udc00"}]}\n', r"message 1: character 1 is \\udc00"),
        (b'{"text": ' + b"[" * 100_000, "line 1: no valid JSON"),
    ],
)
def test_a_broken_jsonl_names_file_and_line(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=told):
        everything(wide(name="jsonl", path=str(tmp_path / "a.jsonl")))


def test_a_parquet_file_that_is_damaged_inside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"abc {n} " * 50 for n in range(2000)]}), path)
    content = bytearray(path.read_bytes())
    content[200:4000] = bytes(3800)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.parquet, after row 0: damaged"):
        everything(wide(name="parquet", path=str(path)))


def test_other_broken_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    (tmp_path / "a.txt").write_bytes(b"one\ntwo \xff\n")
    (tmp_path / "empty").mkdir()
    for name, path, told in [
        ("parquet", "a.parquet", "a.parquet: no parquet file"),
        ("text", "a.txt", "a.txt, line 2: not UTF-8"),
        ("text", "empty", "no text file"),
        ("jsonl", "empty", "no .jsonl or .json file"),
        ("jsonl", "missing", "does not exist"),
        ("dataset", "empty", "cannot be loaded"),
    ]:
        with pytest.raises(InputError, match=told):
            everything(wide(name=name, path=str(tmp_path / path)))


def test_an_id_field_that_a_row_lacks_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"text": "anonymous"}])
    with pytest.raises(InputError, match="line 41: no field data.id_field='name'"):
        everything(wide(name="jsonl", path=path, id_field="name", bad_rows=0))


def test_an_empty_split_says_how_many_documents_there_were(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS[:2])
    config = DataConfig(name="jsonl", path=path, validation_share=0.0)
    with pytest.raises(InputError, match="none of its 2 documents falls into the validation split"):
        list(load_corpus(config).documents("validation"))


def _turns(asks: str, answers: str, role: str, content: str, number: int) -> list[dict[str, str]]:
    return [{role: asks, content: f"question {number}"}, {role: answers, content: f"answer {number}"}]


def _sharegpt(number: int) -> list[dict[str, str]]:
    return _turns("human", "gpt", "from", "value", number)


LAYOUTS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "sharegpt": ("train", lambda n: {"id": f"{n}_0", "conversations": _sharegpt(n)}),
    "ultrachat": (
        "train_sft",
        lambda n: {"prompt": "", "prompt_id": f"{n}", "messages": _turns("user", "assistant", "role", "content", n)},
    ),
    "perfectblend": ("train", lambda n: {"conversations": _sharegpt(n), "source": "a blend"}),
    "magpie": ("train", lambda n: {"uuid": f"{n}", "instruction": "", "response": "", "conversations": _sharegpt(n)}),
}
"""Preset -> split that is read, and a row in the layout of the dataset."""


def _distill(*asked: str) -> DistillConfig:
    config = built("distill", ["target.path=some/target", *asked])
    assert isinstance(config, DistillConfig)
    return config


@pytest.mark.parametrize("preset", LAYOUTS)
def test_presets_read_a_copy_in_the_layout_of_their_dataset(preset: str, tmp_path: Path) -> None:
    split, row = LAYOUTS[preset]
    (tmp_path / "data").mkdir()
    for name, first in ((split, 0), ("test_other", 100)):  # the other split's rows are not read
        write_jsonl(tmp_path / "data" / f"{name}-00000-of-00001.jsonl", [row(first + n) for n in range(20)])
    shares = ["data.validation_share=0", "data.heldout_share=0"]
    config = _distill(f"data={preset}", f"data.path={tmp_path}", *shares)
    found = [document.messages for document in load_corpus(config.data).documents("train")]
    assert found == [_turns("user", "assistant", "role", "content", number) for number in range(20)]


@pytest.mark.parametrize("preset", LAYOUTS)
def test_presets_name_a_dataset_on_the_hub(preset: str) -> None:
    config = _distill(f"data={preset}")
    assert config.data.name == "hub"
    assert (config.data.path or "").count("/") == 1
