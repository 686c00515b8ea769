"""`jacobi`: the target drafts for itself. A window of guesses at later places rides along in the pass that verifies
(`trees.tree.Passengers`), what the target says of them refines the window and fills a pool of n-grams, and these are
what the next rounds draft (lookahead decoding: Fu et al. 2024, arXiv:2402.02057).

Where draft and verdict share their noise, the target's token at a place depends on the text before it alone, and the
guesses converge at any temperature as they do at 0. Under other rules they are the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decode.drafters.base import Context
from decode.drafters.untrained.config import JacobiConfig
from decode.drafters.untrained.jacobi.pool import Pool
from decode.drafters.untrained.jacobi.window import Window, seats
from decode.drafters.untrained.text_drafter import Guess, RowText, TextDrafter
from decode.sampling.warp import warp
from decode.trees.tree import Passengers, Tree


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
        """A text of which the target has said nothing yet."""
        return JacobiText(prompt, self.config)

    def guesses(self, context: Context) -> list[Sequence[Guess]]:
        """Hear what the last pass said of the windows, then as every reader of text."""
        if context.heard is not None and context.heard_at is not None:
            said, places = self._said(context, context.heard, context.heard_at).tolist(), context.heard_at.tolist()
            for row in range(len(said)) if context.running is None else context.running:
                text = self._text(row)
                if places[row][0] == text.window.begin:  # else it was heard before, or said of another text
                    text.hear(*said[row])
        return super().guesses(context)

    def with_passengers(self, tree: Tree) -> Tree:
        """The windows ride along."""
        depths, sees = seats(self.config.window, self.config.levels, tree.num_nodes, tree.tokens.device)
        tokens = tree.tokens.new_tensor([self._text(row).window.tokens for row in range(len(tree.tokens))])
        return replace(tree, passengers=Passengers(tokens, depths, sees))

    def _said(self, context: Context, heard: Tensor, heard_at: Tensor) -> Tensor:
        """(B, 2, W) the target's tokens behind those of the first and the last level. Penalties and bans are not
        foreseen."""
        ends = torch.tensor([0, self.config.levels - 1], device=heard.device)
        shape = (self.config.levels, self.config.window)
        scores = warp(heard.unflatten(1, shape)[:, ends], context.sampling, context.temperature)
        if context.shares_noise and not context.sampling.is_greedy:
            places = heard_at.unflatten(1, shape)[:, ends] + 1
            scores += context.noise.coupled(places.flatten(1)).view_as(scores)
        return scores.argmax(-1)
