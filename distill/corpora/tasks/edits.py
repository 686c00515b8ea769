"""Edits of a piece of a file: a name is replaced, or a line put in."""

from __future__ import annotations

import random

from distill.corpora.tasks.pieces import names, occurrences, renamed

Parts = tuple[str, str]
"""A prompt, and its answer."""


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
