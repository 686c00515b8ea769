"""The tasks of a file: its pieces take turns through the kinds, drawn by the file's text. An edit replaces a name or
puts a line in; an answer quotes lines of the piece; a log fills a few templates in turn with names of the file, a
counter and a field that repeats."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from distill.corpora.corpus import Document
from distill.corpora.tasks.pieces import names, occurrences, pieces, renamed
from distill.corpora.tasks.task import KINDS, Task, TaskKind

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
        return edit(piece, elsewhere, rng)
    if kind == "answer":
        return quotation(piece, rng)
    return log(names(piece), rng)


def edit(piece: str, others: list[str], rng: random.Random) -> Parts | None:
    """An edit of `piece`, by a name or a line of elsewhere in the file; None where there is nothing to edit."""
    make = rng.choice((rename, insertion))
    return make(piece, others, rng)


def rename(piece: str, others: list[str], rng: random.Random) -> Parts | None:
    """`# rename OLD to NEW:`, with the piece above it and the renamed piece below."""
    here = names(piece)
    new = [name for other in others for name in names(other) if name not in here]
    old = [name for name in here if occurrences(piece, name) > 1] or here
    if not old or not new:
        return None
    before, after = rng.choice(old), rng.choice(new)
    return f"# text\n{piece}\n# rename {before} to {after}:", "\n" + renamed(piece, before, after)


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
