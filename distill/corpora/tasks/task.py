"""One task: a prompt that gives a text and asks for something, and the answer, which mostly copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
