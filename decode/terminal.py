"""Painting a completion as it is made: what the draft got right, what the target corrected, what it added."""

from __future__ import annotations

from typing import TextIO

from transformers import PreTrainedTokenizerBase

from decode.loop import Event
from decode.stats import Stats

DIM, GREEN, RED, CYAN, RESET = "\x1b[2m", "\x1b[32m", "\x1b[31m", "\x1b[36m", "\x1b[0m"
LEGEND = (("accepted", GREEN), ("correction", RED), ("bonus", CYAN))


class Painter:
    """Writes tokens to a stream, coloured where it is a terminal (or where `color` says so).

    A byte-level token may hold part of a character: text is written once it is whole, in the colour of its last token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stream: TextIO, color: str = "auto") -> None:
        self.tokenizer, self.stream = tokenizer, stream
        self.paints = color == "always" or (color == "auto" and stream.isatty())
        self._waiting: list[int] = []
        self._before: list[int] = []

    def prompt(self, ids: list[int]) -> None:
        """The legend, then the prompt, dimmed."""
        if self.paints:
            names = "  ".join(f"{paint}{name}{RESET}" for name, paint in LEGEND)
            self.stream.write(f"{DIM}prompt{RESET}  {names}\n\n")
        self._write(str(self.tokenizer.decode(ids)), DIM)
        self._before = ids[-1:]

    def event(self, event: Event) -> None:
        """The tokens of one round: the accepted ones, then a correction, or a bonus where nothing was refused."""
        for i, token in enumerate(event.tokens):
            last = CYAN if event.accepted == event.drafted else RED
            self._token(token, GREEN if i < event.accepted else last)
        self.stream.flush()

    def end(self, stats: Stats) -> None:
        """What still waits for the rest of a character, and the figures of the run."""
        self._write(self._text(), "")
        self.stream.write(
            f"\n\n{stats.num_tokens} tokens in {stats.num_target_passes} target passes: "
            f"{stats.tau:.2f} tokens per pass, {stats.tokens_per_s:.0f} tokens/s\n"
        )
        if stats.distance is not None:
            self.stream.write(f"lossy: mean TV distance from the target's distribution {stats.distance:.3f}\n")
        self.stream.flush()

    def _token(self, token: int, paint: str) -> None:
        self._waiting.append(token)
        text = self._text()
        if not text.endswith("�"):
            self._write(text, paint)
            self._before, self._waiting = [token], []

    def _text(self) -> str:
        """The waiting tokens as text, read after the one before them: some decoders drop the space that text begins
        with."""
        before = str(self.tokenizer.decode(self._before))
        return str(self.tokenizer.decode(self._before + self._waiting))[len(before) :]

    def _write(self, text: str, paint: str) -> None:
        self.stream.write(f"{paint}{text}{RESET}" if self.paints else text)
