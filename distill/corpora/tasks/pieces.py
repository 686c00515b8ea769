"""What tasks are made of: pieces of a file, a few lines each, and the names in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import dedent, indent

LINES = 6
LONGEST_LINE = 76
MOST_CHARACTERS = 260
"""Of a piece: about 80 tokens of a 4,096-entry tokenizer, so that a task fits into 256 tokens."""
MARGIN = "    "
"""Before every line of a piece: a line's first word then has the tokens that it has in an instruction, where a space
stands before it too."""
_NAME = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{2,15}\b")


def pieces(source: str) -> Iterator[str]:
    """Pieces of LINES lines that do not overlap, blank lines left out, indented by MARGIN; long-winded ones are left
    out."""
    lines = [line.rstrip() for line in source.expandtabs(4).splitlines() if line.strip()]
    for start in range(0, len(lines) - LINES + 1, LINES):
        part = lines[start : start + LINES]
        piece = dedent("\n".join(part))
        if len(piece) <= MOST_CHARACTERS and max(map(len, piece.split("\n"))) <= LONGEST_LINE:
            yield indent(piece, MARGIN)


def names(text: str) -> list[str]:
    """Names and words of 3 to 16 characters in the order of their first places, each once."""
    return list(dict.fromkeys(_NAME.findall(text)))


def occurrences(text: str, name: str) -> int:
    """How often `name` stands in `text` as a whole word."""
    return len(re.findall(rf"\b{re.escape(name)}\b", text))


def renamed(text: str, old: str, new: str) -> str:
    """`text` with the whole word `old` replaced by `new`."""
    return re.sub(rf"\b{re.escape(old)}\b", lambda _: new, text)
