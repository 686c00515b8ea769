"""Corpora: what is read, how it is split, and what a broken one says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from decode.common.errors import InputError
from distill.config import DataConfig, DistillConfig
from distill.corpora import Document, load_corpus
from distill.corpora.corpus import split_of
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
        (b'{"messages": [{"role": "user"}]}\n', "line 1, message 1: role and content must be text"),
        (b'{"messages": ["hi"]}\n', "line 1, message 1: a message is an object"),
        (b'{"messages": [{"from": ["x"], "value": "y"}]}\n', "line 1, message 1: role and content must be text"),
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
        everything(wide(name="jsonl", path=path, id_field="name"))


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
