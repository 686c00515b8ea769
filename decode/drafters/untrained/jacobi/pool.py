"""The n-grams that a window has come upon, found by their first token (the n-gram pool of Fu et al. 2024, "Break the
Sequential Dependency of LLM Inference Using Lookahead Decoding", arXiv:2402.02057)."""

from __future__ import annotations

from collections.abc import Sequence


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
