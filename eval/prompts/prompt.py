"""What every arm continues, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from decode.common.errors import InputError

DEEPEST_DRAFT = 32
"""Positions kept free behind a continuation for a draft that is longer than what is left to write."""


@dataclass(frozen=True)
class Prompt:
    """Token ids that all arms are given; `history` holds the chat so far, `later` the user's turns still to come."""

    id: str
    category: str | None
    ids: tuple[int, ...]
    history: tuple[dict[str, Any], ...] = ()
    later: tuple[str, ...] = ()
    document: str = ""
    """The document or conversation that several prompts come from; empty where this is its only one."""

    @property
    def unit(self) -> str:
        """What is resampled whole: prompts of one document are no independent witnesses."""
        return self.document or self.id


def check_room(prompts: Iterable[Prompt], new_tokens: int, max_positions: int) -> None:
    """InputError for the first prompt that leaves no room for `new_tokens` more."""
    for prompt in prompts:
        if len(prompt.ids) + new_tokens > max_positions:
            raise InputError(
                f"prompt {prompt.id!r} has {len(prompt.ids)} tokens, and {new_tokens} more exceed the "
                f"{max_positions} positions that target and drafts share. Lower decode.max_new_tokens, "
                "lossless.tokens or prompts.tokens, or drop it"
            )
