"""Tasks of a corpus: as documents to train on, and as prompts with the answers that are right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, zip_longest
from pathlib import Path

from distill.config import DataConfig
from distill.corpora.bad_rows import BadRow
from distill.corpora.corpus import Corpus, Document, Split, split_place
from distill.corpora.tasks.made import tasks_of
from distill.corpora.tasks.task import Task, TaskKind
from distill.corpora.text_files import python_stdlib, text_files


def task_documents(files: Iterable[Document | BadRow]) -> Iterator[Document | BadRow]:
    """A document for every task made from `files`, split as its file is; the category is the kind of task."""
    for file in files:
        if isinstance(file, BadRow):
            yield file
            continue
        place = split_place(file.text or "")
        for task in tasks_of(file):
            yield Document(task.id, task.text, category=task.kind, place=place)


def task_prompts(kind: TaskKind, config: DataConfig, split: Split, wanted: int) -> list[Task]:
    """Up to `wanted` tasks of `kind`, the files of `split` giving one each in turn; always the same ones.

    Raises InputError where `config.path` cannot be read, and EmptySplitError where the split has no file.
    """
    read = python_stdlib if config.path is None else lambda: text_files(Path(str(config.path)))
    files = Corpus(replace(config, max_documents=None), config.path or "the Python standard library", read)
    of_kind = ((task for task in tasks_of(file) if task.kind == kind) for file in files.documents(split))
    turns = chain.from_iterable(zip_longest(*(islice(of_file, wanted) for of_file in of_kind)))
    files.bad.report()
    return list(islice((task for task in turns if task is not None), wanted))
