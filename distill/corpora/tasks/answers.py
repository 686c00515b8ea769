"""Questions about a piece of a file whose answers are lines quoted from it."""

from __future__ import annotations

import random

Parts = tuple[str, str]
MOST_LINES = 3
WORDS = 3
"""Of a line that a question may give to name it."""


def quotation(piece: str, rng: random.Random) -> Parts | None:
    """`# quote N lines from WORDS:`, with the piece above and its lines below, from the one that begins so; None where
    no line is told from all others by its first words."""
    lines = piece.split("\n")
    starts = [(number, start) for number in range(len(lines)) if (start := _start(lines, number)) is not None]
    if not starts:
        return None
    first, start = rng.choice(starts)
    count = rng.randint(1, min(MOST_LINES, len(lines) - first))
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
