"""`jacobi`: the target drafts for itself. A window of guesses at later places rides along in the pass that verifies
(`trees.tree.Passengers`), what the target says of them refines the window and fills a pool of n-grams, and these are
what the next rounds draft (lookahead decoding: Fu et al. 2024, arXiv:2402.02057).

Where draft and verdict share their noise, the target's token at a place depends on the text before it alone, and the
guesses converge at any temperature as they do at 0. Under other rules they are the likeliest tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from decode.drafters.base import Context
from decode.drafters.untrained.config import JacobiConfig
from decode.drafters.untrained.text_drafter import Guess, RowText, TextDrafter
from decode.sampling.warp import warp
from decode.trees.tree import Passengers, Tree


class Ngram(NamedTuple):
    """Tokens that the target came upon."""

    place: int
    """Of the first token in the text."""
    tokens: list[int]


class Window:
    """The guesses at the places behind one text, which every pass refines (the lookahead branch; with one level the
    Jacobi iteration of Santilli et al. 2023, arXiv:2305.10427): L levels of W tokens. Token c of level j is a guess at
    place `begin` + c + j, where the text has `begin` tokens; it sees the text, the first level up to c, and the tokens
    of its own column c in the levels between. So each column is a way on, written a token a pass: what the target says
    behind its last token is the next one, while the first one leaves. Rows of text do not know of each other."""

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
        self._heard = [min(levels + 1, len(self.levels)) for levels in self._heard]
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


class Pool:
    """The `most` n-grams that came last, of each first token."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._behind: dict[int, dict[tuple[int, ...], int]] = {}  # first token -> the others -> place, the oldest first

    def add(self, tokens: Sequence[int], place: int) -> None:
        """An n-gram whose first token was guessed for this place of the text."""
        known = self._behind.setdefault(tokens[0], {})
        known.pop(tuple(tokens[1:]), None)
        known[tuple(tokens[1:])] = place
        if len(known) > self._most:
            del known[next(iter(known))]

    def found(self, token: int, place: int) -> list[tuple[bool, tuple[int, ...]]]:
        """What may follow `token` at this place: whether it was guessed for the very place, and the tokens. Those that
        were come first, then the last ones: with shared noise the target draws otherwise at every place."""
        known = reversed(self._behind.get(token, {}).items())
        return sorted(((at == place, behind) for behind, at in known), key=lambda one: not one[0])

    def continued(self, tokens: Sequence[int], place: int, depth: int) -> list[int]:
        """`tokens`, of which the first stands at `place`, and the best n-gram behind the last one again and again, up
        to `depth` tokens."""
        text = list(tokens)
        while 0 < len(text) < depth:
            following = self.found(text[-1], place + len(text) - 1)
            if not following:
                break
            text += following[0][1]
        return text[:depth]


class JacobiText(RowText):
    """A text with guesses at what follows."""

    def __init__(self, prompt: list[int], config: JacobiConfig) -> None:
        super().__init__(len(prompt))
        self.text = list(prompt)
        self.window, self.pool = Window(config.window, config.levels, prompt), Pool(config.pool)

    def grow(self, tokens: Sequence[int]) -> None:
        """It is what the window begins behind."""
        self.text += tokens

    def hear(self, first: Sequence[int], last: Sequence[int]) -> None:
        """What the target says behind the first level of the window and the last one."""
        for place, tokens in self.window.hear(first, last):
            self.pool.add(tokens, place)

    def guesses(self, depth: int, most: int) -> list[Guess]:
        """N-grams of the last token, those that were guessed for its very place first; then the refined window. (The
        window before other n-grams: 1.2 tokens a pass of the toy's target at temperature 0 instead of 3.0.)"""
        self.window.move(self.text)
        here = len(self.text)
        known = self.pool.found(self.text[-1], here - 1)
        self.strength = 0 if not known else 2 if known[0][0] else 1
        refined = [tuple(self.window.refined)] if self.window.refined else []
        found = [*(behind for _, behind in known), *refined]
        return [self.pool.continued(tokens, here, depth) for tokens in found[:most]]


class JacobiDrafter(TextDrafter[JacobiText]):
    """Drafts from what the target said of places that it had not reached."""

    family = "jacobi"

    def __init__(self, config: JacobiConfig | None = None) -> None:
        super().__init__()
        self.config = config or JacobiConfig()

    @property
    def most_passengers(self) -> int:
        """The window's tokens."""
        return self.config.levels * self.config.window

    def begin(self, prompt: list[int]) -> JacobiText:
        return JacobiText(prompt, self.config)

    def guesses(self, context: Context) -> list[Sequence[Guess]]:
        """Hear what the last pass said of the windows, then as every reader of text."""
        if context.passenger_logits is not None and context.passenger_positions is not None:
            said, places = (
                self._said(context, context.passenger_logits, context.passenger_positions).tolist(),
                context.passenger_positions.tolist(),
            )
            for row in range(len(said)) if context.running is None else context.running:
                text = self._text(row)
                if places[row][0] == text.window.begin:  # else it was heard before, or said of another text
                    text.hear(*said[row])
        return super().guesses(context)

    def with_passengers(self, tree: Tree) -> Tree:
        depths, sees = seats(self.config.window, self.config.levels, tree.num_nodes, tree.tokens.device)
        tokens = tree.tokens.new_tensor([self._text(row).window.tokens for row in range(len(tree.tokens))])
        return replace(tree, passengers=Passengers(tokens, depths, sees))

    def _said(self, context: Context, passenger_logits: Tensor, passenger_positions: Tensor) -> Tensor:
        """(B, 2, W) the target's tokens behind those of the first and the last level. Penalties and bans are not
        foreseen."""
        ends = torch.tensor([0, self.config.levels - 1], device=passenger_logits.device)
        shape = (self.config.levels, self.config.window)
        scores = warp(passenger_logits.unflatten(1, shape)[:, ends], context.sampling, context.temperature)
        if context.shares_noise and not context.sampling.is_greedy:
            places = passenger_positions.unflatten(1, shape)[:, ends] + 1
            scores += context.noise.coupled(places.flatten(1)).view_as(scores)
        return scores.argmax(-1)
