"""Text set into Markdown: names, paths and categories are shown as they are, whatever characters they hold.

Without it `<script>` in a path is HTML, and a newline or a `|` in a category ends a table's cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"[\\`*~|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=\])[(\[]")


def plain(text: str) -> str:
    """Any text on one line, to be read as it stands. Underscores inside a word and brackets without a link mean
    nothing and stay."""
    line = re.sub("[&<>]", lambda found: _ENTITIES[found[0]], _one_line(text))
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", line)


def code(text: str) -> str:
    """Any text on one line as code; an HTML element where a code span would end early or hold what looks like HTML."""
    line = _one_line(text)
    return f"<code>{plain(line)}</code>" if re.search(r"[`<>&|]", line) or not line else f"`{line}`"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells are plain text."""
    return "\n".join([_row(columns), _row(["---"] * len(columns)), *(_row(row) for row in rows)])


def fenced(language: str, lines: Iterable[str]) -> str:
    """A block of code; its fence is longer than any that the lines hold."""
    body = "\n".join(lines)
    longest = max((len(run) for run in re.findall("`+", body)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{body}\n{fence}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(plain(cell) for cell in cells) + " |"
