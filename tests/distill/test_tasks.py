"""Tasks made from files, and chats of everyday: answers are right, they are the same everywhere, and no file or topic
stands on both sides of a split."""

import hashlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import distill.corpora.tasks as tasks_module
from decode.common.errors import InputError
from distill.corpora.config import DataConfig
from distill.corpora.configured import load_corpus
from distill.corpora.corpus import Document, EmptySplitError, Split, split_of
from distill.corpora.everyday import KINDS as CHAT_KINDS
from distill.corpora.everyday import everyday_chats
from distill.corpora.everyday.chats import QUOTING
from distill.corpora.tasks import KINDS, Task, TaskKind, task_prompts
from distill.corpora.text_files import python_stdlib, text_files
from distill.prompts.tokenizer import train_bpe

CONFIG = DataConfig(name="tasks")


@cache
def standard_library() -> list[Document]:
    """Read once: it takes 0.4 s."""
    return list(python_stdlib())


def prose(folder: Path) -> Path:
    """Small files of prose, in `folder`."""
    for number in range(40):
        lines = (
            f"Line{line} of person{number} has item{line % 3} and likes town{line * number}." for line in range(30)
        )
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


def tasks(kind: TaskKind) -> list[Task]:
    """Of files of the standard library that are held out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks_module, "python_stdlib", standard_library)
        return task_prompts(kind, CONFIG, "heldout", 200)


def parts(prompt: str, pattern: str) -> tuple[str, ...]:
    """What the groups of `pattern` say in a prompt, which must be all of it."""
    found = re.fullmatch(pattern, prompt, re.DOTALL)
    assert found is not None, prompt
    return found.groups()


def test_a_renamed_text_is_the_given_one_word_by_word_but_for_the_name() -> None:
    renames = [task for task in tasks("edit") if "\n# rename " in task.prompt]
    assert len(renames) > 50
    for task in renames:
        given, old, new = parts(task.prompt, r"# text\n(.*)\n# rename (\S+) to (\S+):")
        assert given == task.document
        words, changed = re.split(r"(\w+)", given), re.split(r"(\w+)", task.answer.removeprefix("\n"))
        assert changed == [new if word == old else word for word in words]
        assert old in words
        assert new not in words  # else the change could not be undone


def test_an_inserted_line_stands_behind_the_line_that_was_named() -> None:
    insertions = [task for task in tasks("edit") if "\n# insert\n" in task.prompt]
    assert len(insertions) > 50
    for task in insertions:
        given, before, line = parts(task.prompt, r"# text\n(.*)\n# after\n(.*)\n# insert\n(.*)\n# result:")
        lines = task.answer.split("\n")[1:]
        place = lines.index(line)
        assert lines[:place] + lines[place + 1 :] == given.split("\n") == task.document.split("\n")
        assert lines[place - 1] == before
        assert given.split("\n").count(before) == 1


def test_a_quotation_is_the_lines_of_its_document_that_the_question_names() -> None:
    counts = set()
    for task in tasks("answer"):
        given, count, start = parts(task.prompt, r"# text\n(.*)\n# quote (\d) lines? from (.*):")
        assert given == task.document
        assert f"\n{given}\n".count(f"{task.answer}\n") == 1
        quoted = task.answer.split("\n")[1:]
        assert len(quoted) == int(count)
        assert [line for line in given.split("\n") if line.strip().startswith(start)] == quoted[:1]
        counts.add(count)
    assert counts == {"1", "2", "3"}


def test_a_log_goes_on_as_it_began() -> None:
    for task in tasks("log"):
        lines = task.text.split("\n")[1:]
        numbers, texts = zip(*((int(line[:2]), line[2:]) for line in lines), strict=True)
        assert list(numbers) == list(range(numbers[0], numbers[0] + len(lines)))
        turns = len(set(texts))
        assert turns in (2, 3)
        assert texts == tuple((texts[:turns] * len(lines))[: len(lines)])
        given = task.prompt.count("\n")
        assert given >= 2 * turns  # every line of the answer has been seen twice


def test_a_file_decides_the_split_of_its_tasks(tmp_path: Path) -> None:
    folder = prose(tmp_path)
    config = DataConfig(name="tasks", path=str(folder), heldout_share=0.3, validation_share=0.3)
    files = {file.id: file for file in text_files(folder) if isinstance(file, Document)}
    for split in get_args(Split):
        documents = list(load_corpus(config).documents(split))
        assert {split_of(files[one.id.rsplit("#", 1)[0]], config) for one in documents} == {split}
        assert {one.category for one in documents} == set(KINDS)
        assert len({one.id for one in documents}) == len(documents)
        texts = {one.text for one in documents}
        for kind in KINDS:
            prompts = task_prompts(kind, config, split, 10)
            assert len(prompts) == 10
            assert {task.text for task in prompts} <= texts
            assert {split_of(files[task.id.rsplit("#", 1)[0]], config) for task in prompts} == {split}
            assert all(task.source == files[task.id.rsplit("#", 1)[0]].text for task in prompts)


@pytest.mark.slow
def test_prompts_are_spread_over_the_files() -> None:
    for kind in KINDS:
        firsts = [task.id.rsplit("#", 1)[0] for task in task_prompts(kind, CONFIG, "heldout", 12)]
        assert len(set(firsts)) == 12


def test_tasks_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Python's own hash of a text is another one in every process."""
    folder = prose(tmp_path)
    program = (
        "import sys; from distill.corpora.config import DataConfig; "
        "from distill.corpora.configured import load_corpus; "
        "config = DataConfig(name='tasks', path=sys.argv[1]); "
        "print([one.text for one in load_corpus(config).documents('train')])"
    )
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    config = DataConfig(name="tasks", path=str(folder))
    assert done.stdout.strip() == str([one.text for one in load_corpus(config).documents("train")])


def test_prompt_and_answer_have_the_tokens_of_the_whole_text() -> None:
    """What is trained on is one text; a benchmark hands over the prompt alone."""
    every = [task for kind in KINDS for task in tasks(kind)]
    tokenizer = train_bpe([task.text for task in every], 1024)
    for task in every:
        ids = [tokenizer(part)["input_ids"] for part in (task.prompt, task.answer, task.text)]
        assert ids[0] + ids[1] == ids[2]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("path", "says"),
    [("missing", "missing does not exist; give the tasks file or folder"), ("empty", "no text file below this folder")],
)
def test_a_folder_without_files_is_refused(tmp_path: Path, path: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    config = DataConfig(name="tasks", path=str(tmp_path / path))
    with pytest.raises(InputError, match=says):
        list(load_corpus(config).documents("train"))


def test_files_too_short_for_a_piece_are_no_documents(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one line\n")
    config = DataConfig(name="tasks", path=str(tmp_path))
    with pytest.raises(InputError, match="no document with text in it"):
        list(load_corpus(config).documents("train"))
    with pytest.raises(EmptySplitError):
        task_prompts("edit", DataConfig(name="tasks", path=str(tmp_path), heldout_share=0), "heldout", 3)


def questions(documents: list[Document]) -> list[str]:
    return [document.messages[0]["content"] for document in documents if document.messages]


def test_all_kinds_of_all_topics_are_asked_and_nothing_twice() -> None:
    chats = list(everyday_chats())
    counts = {kind: sum(chat.category == kind for chat in chats) for kind in CHAT_KINDS}
    assert counts == {kind: 48 * (4 if kind in QUOTING else 3) for kind in CHAT_KINDS}
    assert len({chat.id for chat in chats}) == len(set(questions(chats))) == len(chats) == 1344
    assert not [text for text in questions(chats) if "{" in text or "}" in text]


def test_the_same_chats_are_made_everywhere() -> None:
    """Held-out prompts of another machine, Python or process must not have been trained on: the hash is the contract.
    Whoever changes a template or a topic changes it, and what drafts were trained on before."""
    digest = hashlib.sha256(json.dumps(questions(list(everyday_chats()))).encode()).hexdigest()
    assert digest[:16] == "77f0fc950de3dd0a"


def test_topics_are_split_whole_and_every_split_has_every_kind() -> None:
    corpus = load_corpus(DataConfig(name="everyday", validation_share=0.1, heldout_share=0.15))
    found = {split: list(corpus.documents(split)) for split in ("train", "validation", "heldout")}
    topics = [{chat.id.split("/")[0] for chat in chats} for chats in found.values()]
    assert [len(one) for one in topics] == [36, 5, 7]
    assert len(set.union(*topics)) == 48
    assert all({chat.category for chat in chats} == set(CHAT_KINDS) for chats in found.values())
