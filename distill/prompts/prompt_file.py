"""The prompts of a run on disk: a line of JSON each, and where it begins, so that any is read without the others."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import overload

import numpy as np

from distill.prompts.drawn_prompts import DrawnPrompt

LINES, STARTS = "prompts.jsonl", "starts.npy"


def write_prompts(prompts: Iterable[DrawnPrompt], folder: Path) -> PromptFile:
    """Write them to a new folder, one at a time."""
    folder.mkdir()
    starts = array("q", [0])
    with (folder / LINES).open("wb") as file:
        for prompt in prompts:
            starts.append(starts[-1] + file.write(json.dumps(astuple(prompt)).encode() + b"\n"))
    np.save(folder / STARTS, np.array(starts, np.int64))
    return PromptFile(folder)


class PromptFile(Sequence[DrawnPrompt]):
    """The prompts in a folder, by number; mapped, so that the ranks of a machine share what is in memory of them."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError and ValueError where it is not whole."""
        self.folder = folder
        self._starts = np.load(folder / STARTS, mmap_mode="r")
        self._lines = np.memmap(folder / LINES, np.uint8, "r")

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> DrawnPrompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[DrawnPrompt]: ...
    def __getitem__(self, index: int | slice) -> DrawnPrompt | list[DrawnPrompt]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        line = self._lines[self._starts[index] : self._starts[index + 1]]
        return DrawnPrompt(*json.loads(line.tobytes()))
