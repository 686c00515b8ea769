"""The guesses at the places behind one text, which every pass of the target refines (the lookahead branch of Fu et al.
2024, arXiv:2402.02057; with one level the Jacobi iteration of Santilli et al. 2023, arXiv:2305.10427)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Ngram(NamedTuple):
    """Tokens that the target came upon."""

    place: int
    """Of the first token in the text."""
    tokens: list[int]


class Window:
    """L levels of W tokens. Token c of level j is a guess at place `begin` + c + j, where the text has `begin` tokens;
    it sees the text, the first level up to c, and the tokens of its own column c in the levels between. So each column
    is a way on, written a token a pass: what the target says behind its last token is the next one, while the first one
    leaves. Rows of text do not know of each other."""

    def __init__(self, width: int, levels: int, text: Sequence[int]) -> None:
        self.begin = len(text) - width
        self.levels: list[list[int]] = [[0] * width for _ in range(levels)]
        self.refined: list[int] = []
        """What the target said last of the places from `begin` on, behind the first level: the Jacobi iteration. The
        first one is certain where the guesses before it were right."""
        self._heard = [0] * width  # tokens at the end of each column that are the target's
        self.move(text)

    def move(self, text: Sequence[int]) -> None:
        """Begin behind the text as it is now: columns at places that were written leave, and new ones hold tokens of
        the text, drawn by their place alone, so that a text does not depend on the batch it came in."""
        width, gone = len(self._heard), len(text) - self.begin
        self.begin, kept = len(text), max(0, width - gone)
        for number, level in enumerate(self.levels):
            places = range(self.begin + kept + number, self.begin + width + number)
            level[:] = [*level[width - kept :], *(random.Random(place).choice(text) for place in places)]
        self._heard = self._heard[width - kept :] + [0] * (width - kept)
        self.refined = self.refined[gone:]

    def hear(self, first: Sequence[int], last: Sequence[int]) -> list[Ngram]:
        """Take what the target says behind the tokens of the first level and of the last one, (W,) each, and tell the
        n-grams that this makes: of a young column those tokens alone that are the target's, and the one before them."""
        found = []
        for column, token in enumerate(last):
            tokens = [*(level[column] for level in self.levels), token]
            known = tokens[-2 - self._heard[column] :]
            found.append(Ngram(self.begin + column + len(tokens) - len(known), known))
        self.levels = [*self.levels[1:], list(last)]
        self.begin += 1
        self.refined = list(first)
        self._heard = [min(heard + 1, len(self.levels)) for heard in self._heard]
        return found

    @property
    def tokens(self) -> list[int]:
        """All of them, level by level: the passengers of the next pass."""
        return [token for level in self.levels for token in level]


@cache
def seats(
    width: int, levels: int, num_nodes: int, device: torch.device
) -> tuple[Tensor, Tensor]:  # (1, P), (1, P, N + P)
    """Depths behind pending, and who sees whom, of a window's P = levels * width tokens beside N nodes, of which they
    see pending alone. Uploaded once."""
    with torch.inference_mode(mode=False):
        level, column = (
            one.flatten() for one in torch.meshgrid(torch.arange(levels), torch.arange(width), indexing="ij")
        )
        in_first = (level[None] == 0) & (column[None] <= column[:, None])
        in_column = (column[None] == column[:, None]) & (level[None] <= level[:, None])
        beside = torch.zeros(levels * width, num_nodes, dtype=torch.bool)
        beside[:, 0] = True
        sees = torch.cat([beside, in_first | in_column], 1)
        return (1 + level + column)[None].to(device), sees[None].to(device)
