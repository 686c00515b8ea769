"""Tokens as text and text as tokens, also of a text that grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

UNKNOWN = "\ufffd"
"""What stands for bytes that are no whole character."""
BEHIND = 8
"""Tokens before a place that say how what follows is spelled: pre-tokenizers split at words."""
LONGEST_CHARACTER = 4
"""Bytes, so tokens at most, of one character."""


@dataclass(frozen=True)
class Spelling:
    """A tokenizer with the size of the vocabulary of its model."""

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int

    @cached_property
    def special(self) -> dict[int, str]:
        """Tokens that stand for no text -> their names."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).items()
        named = zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True)
        return {token: one.content for token, one in added if one.special} | dict(named)

    @cached_property
    def lead(self) -> list[int]:
        """What the tokenizer puts before every text, the begin token for example."""
        whole, bare = list(self.tokenizer("a")["input_ids"]), self.ids("a")  # type: ignore[arg-type]
        found = (place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
        return whole[: next(found, 0)]

    def text(self, ids: Sequence[int]) -> str:
        """Of these tokens."""
        found = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(found, str)
        return found

    def ids(self, text: str) -> list[int]:
        """The tokens of a text; ones that were added to the tokenizer alone are left out, for the model has none."""
        found = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [token for token in found if token < self.vocab_size]  # type: ignore[union-attr]

    def last(self, ids: list[int]) -> list[int]:
        """The last tokens, at least BEHIND if there are, from the beginning of a character on: some tokenizers read
        no character of a run of bytes that begins within one."""
        sizes = range(min(BEHIND, len(ids)), min(BEHIND + LONGEST_CHARACTER, len(ids)) + 1)
        tails = (ids[len(ids) - size :] for size in sizes)
        return next((tail for tail in tails if not self.text(tail).startswith(UNKNOWN)), ids[-BEHIND:])

    def whole(self, ids: Sequence[int], least: int) -> int:
        """How many of these tokens, more than `least`, end with a whole character; all of them where none do, since
        bytes that are no text never become one."""
        ends = range(len(ids), max(least, len(ids) - LONGEST_CHARACTER), -1)
        return next((end for end in ends if not self.text(ids[:end]).endswith(UNKNOWN)), _short(ids, least))

    def grown(self, ids: list[int], text: str, more: str) -> list[int]:
        """The tokens of text + more, where those of text are `ids`: the last words alone are spelled anew."""
        tail = self._tail(ids)
        if tail is None:
            return self.ids(text + more)
        return [*ids[: len(ids) - len(tail)], *self.ids(self.text(tail) + more)]

    def _tail(self, ids: list[int]) -> list[int] | None:
        """Some of the last tokens, or all, that are spelled so by themselves, where a word begins perhaps; few only
        where there are no more. None where there are none."""
        enough = min(BEHIND, len(ids))
        for size in (*range(enough, min(2 * BEHIND, len(ids)) + 1), *range(enough - 1, 0, -1)):
            tail = ids[len(ids) - size :]
            if self.ids(self.text(tail)) == tail:
                return tail
        return None


def _short(ids: Sequence[int], least: int) -> int:
    """Where no whole character was found: a few bytes may become one, more never will."""
    return least if len(ids) - least < LONGEST_CHARACTER else len(ids)
