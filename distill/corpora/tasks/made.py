"""The tasks of a file: its pieces take turns through the kinds, drawn by the file's text."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from distill.corpora.corpus import Document
from distill.corpora.tasks.answers import quotation
from distill.corpora.tasks.edits import edit
from distill.corpora.tasks.logs import log
from distill.corpora.tasks.pieces import names, pieces
from distill.corpora.tasks.task import KINDS, Task, TaskKind


def tasks_of(file: Document) -> Iterator[Task]:
    """The tasks made from a file, one of each piece that gives one; the same text gives the same tasks."""
    source = file.text or ""
    parts = list(pieces(source))
    digest = hashlib.sha256(source.encode()).hexdigest()
    for number, piece in enumerate(parts):
        kind = KINDS[number % len(KINDS)]
        rng = random.Random(f"{digest}:{number}")  # of a string it is the same in every process
        elsewhere = [parts[(number + 1) % len(parts)], parts[number - 1]]
        made = _made(kind, piece, elsewhere, rng)
        if made is not None:
            prompt, answer = made
            document = prompt if kind == "log" else piece
            yield Task(kind, f"{file.id}#{kind}{number}", prompt, answer, document, source)


def _made(kind: TaskKind, piece: str, elsewhere: list[str], rng: random.Random) -> tuple[str, str] | None:
    if kind == "edit":
        return edit(piece, elsewhere, rng)
    if kind == "answer":
        return quotation(piece, rng)
    return log(names(piece), rng)
