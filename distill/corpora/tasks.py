"""Tasks of a corpus, as documents to train on and as prompts with the answers that are right. Each mostly copies: a
text is edited, quoted from, or goes on as it began. A file's pieces take turns through the kinds, drawn by the file's
text. An edit replaces a name or puts a line in; an answer quotes lines of the piece; a log fills a few templates in
turn with names of the file, a counter and a field that repeats."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from textwrap import dedent, indent
from typing import Literal

from distill.corpora.bad_rows import BadRow
from distill.corpora.config import DataConfig
from distill.corpora.corpus import Corpus, Document, Split, split_place
from distill.corpora.text_files import python_stdlib, text_files

TaskKind = Literal["edit", "answer", "log"]
KINDS: tuple[TaskKind, ...] = ("edit", "answer", "log")


@dataclass(frozen=True)
class Task:
    """Prompt and answer. An answer begins by a line break, so that both parts have the tokens of the whole text."""

    kind: TaskKind
    id: str
    """The file and the number of the task in it."""
    prompt: str
    answer: str
    document: str
    """What the prompt gives to copy from: the piece of a file, or the log so far."""
    source: str
    """Text of the whole file that the task was made from, which decides its split."""

    @property
    def text(self) -> str:
        """What a model is trained on."""
        return self.prompt + self.answer


FEWEST_LINES, MOST_LINES = 3, 6
MOST_CHARACTERS = 260
"""Of a piece: about 80 tokens of a 4,096-entry tokenizer, so that most tasks fit into 256 tokens."""
MARGIN = "    "
"""Before every line of a piece: a line's first word then has the tokens that it has in an instruction, where a space
stands before it too."""
_NAME = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{2,15}\b")


def pieces(source: str) -> Iterator[str]:
    """Pieces of FEWEST_LINES to MOST_LINES lines that do not overlap, blank lines left out, indented by MARGIN."""
    lines = [line.rstrip() for line in source.expandtabs(4).splitlines() if line.strip()]
    start = 0
    while start < len(lines):
        part = _from(lines, start)
        if len(part) >= FEWEST_LINES:
            yield indent(dedent("\n".join(part)), MARGIN)
        start += max(1, len(part))


def _from(lines: list[str], start: int) -> list[str]:
    """As many lines as a piece takes."""
    part: list[str] = []
    free = MOST_CHARACTERS
    for line in lines[start : start + MOST_LINES]:
        free -= len(line.strip()) + 1
        if free < 0:
            break
        part.append(line)
    return part


def names(text: str) -> list[str]:
    """Names and words of 3 to 16 characters in the order of their first places, each once."""
    return list(dict.fromkeys(_NAME.findall(text)))


Parts = tuple[str, str]
"""A prompt, and its answer."""
LINES_QUOTED = 3
WORDS = 3
"""Of a line that a question may give to name it."""
GIVEN, CONTINUED = 6, 8
"""Lines in the prompt and in the answer."""
TEMPLATES = (
    "{count:02} {place}: open {name}",
    "{count:02} {place}: {name} is {state}",
    "{count:02} {place}: wrote {name}, {state}",
    "{count:02} INFO {place} reads {name}",
    "{count:02} {name}={state} in {place}",
)
STATES = ("ok", "done", "ready", "waiting", "retry", "closed")


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


def _made(kind: TaskKind, piece: str, elsewhere: list[str], rng: random.Random) -> Parts | None:
    if kind == "edit":
        return rng.choice((rename, insertion))(piece, elsewhere, rng)
    if kind == "answer":
        return quotation(piece, rng)
    return log(names(piece), rng)


def rename(piece: str, others: list[str], rng: random.Random) -> Parts | None:
    """`# rename OLD to NEW:`, with the piece above it and the renamed piece below."""
    here = names(piece)
    new = [name for other in others for name in names(other) if name not in here]
    old = [name for name in here if len(re.findall(rf"\b{re.escape(name)}\b", piece)) > 1] or here
    if not old or not new:
        return None
    before, after = rng.choice(old), rng.choice(new)
    renamed = re.sub(rf"\b{re.escape(before)}\b", lambda _: after, piece)
    return f"# text\n{piece}\n# rename {before} to {after}:", "\n" + renamed


def insertion(piece: str, others: list[str], rng: random.Random) -> Parts | None:
    """`# after`, a line of the piece, `# insert`, another line, `# result:`, and the piece with that line put in."""
    lines = piece.split("\n")
    once = [number for number, line in enumerate(lines) if lines.count(line) == 1]
    new = [line for other in others for line in other.split("\n") if line not in lines]
    if not once or not new:
        return None
    place, line = rng.choice(once), rng.choice(new)
    result = [*lines[: place + 1], line, *lines[place + 1 :]]
    return f"# text\n{piece}\n# after\n{lines[place]}\n# insert\n{line}\n# result:", "\n" + "\n".join(result)


def quotation(piece: str, rng: random.Random) -> Parts | None:
    """`# quote N lines from WORDS:`, with the piece above and its lines below, from the one that begins so; None where
    no line is told from all others by its first words."""
    lines = piece.split("\n")
    starts = [(number, start) for number in range(len(lines)) if (start := _start(lines, number)) is not None]
    if not starts:
        return None
    first, start = rng.choice(starts)
    count = rng.randint(1, min(LINES_QUOTED, len(lines) - first))
    quoted = "\n".join(lines[first : first + count])
    return f"# text\n{piece}\n# quote {count} {'lines' if count > 1 else 'line'} from {start}:", "\n" + quoted


def _start(lines: list[str], number: int) -> str | None:
    """The fewest first words of a line that no other line begins with."""
    words = lines[number].split(" ")
    first = next(place for place, word in enumerate(words) if word)
    for last in range(first + 1, min(first + WORDS, len(words)) + 1):
        start = " ".join(words[first:last])
        if sum(line.lstrip().startswith(start) for line in lines) == 1:
            return start
    return None


def log(known: list[str], rng: random.Random) -> Parts | None:
    """A log whose lines take turns through two or three templates; None where there are too few names."""
    if len(known) < 4:
        return None
    place, *fields = rng.sample(known, 4)
    templates = rng.sample(TEMPLATES, rng.randint(2, 3))
    states = rng.sample(STATES, len(templates))
    first = rng.randint(0, 80)
    lines = []
    for number in range(GIVEN + CONTINUED):
        turn = number % len(templates)
        filled = templates[turn].format(count=first + number, place=place, name=fields[turn], state=states[turn])
        lines.append(filled)
    return "# log\n" + "\n".join(lines[:GIVEN]), "\n" + "\n".join(lines[GIVEN:])


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
