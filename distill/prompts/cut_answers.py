"""Answers of a corpus that reach beyond the tokens that a sequence may have, and so lose their end."""

from __future__ import annotations

from collections.abc import Sequence

from decode.common.checked_json import Content, Count, Size


class CutAnswers(Content):
    """What was lost of all that was to be learned."""

    answers: Count
    """Answers of chats, and plain texts."""
    tokens: Count
    """Of theirs that nobody learns."""
    limit: Size
    """Tokens that a sequence may have."""

    def line(self) -> str:
        """For people."""
        return f"{self.answers:,} answers reach beyond {self.limit:,} tokens and lose {self.tokens:,} tokens there"


def cut_at(limit: int, mask: Sequence[bool]) -> tuple[int, int]:
    """(answers that reach beyond `limit` tokens, their tokens there) of a text with these learned tokens."""
    behind = mask[limit:]
    answers = sum(learned and not before for before, learned in zip([False, *behind], behind, strict=False))
    return answers, sum(behind)
