"""Which drafts responses were written with, and what they saved, by shard and over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pydantic import computed_field

from decode.acceptance import tau
from decode.common.checked_json import Content, Count, Size, Text


class RecordedDraft(Content):
    """A draft that responses were written with."""

    path: Text
    """Its folder, or the name of a drafter without weights."""
    family: Text
    fingerprint: Text
    num_draft_tokens: Size


class Drafting(Content):
    """What a draft saved in some responses."""

    draft: RecordedDraft
    tokens: Count
    """Of the responses, end tokens included."""
    passes: Count
    """Of the target, which wrote them; without a draft one for each token."""

    @computed_field
    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass of the target gave."""
        return round(tau(self.tokens, self.passes), 4)


def pooled(each: Iterable[Drafting | None]) -> list[Drafting]:
    """Those of all shards by draft: a run may go on with another one."""
    tokens: Counter[RecordedDraft] = Counter()
    passes: Counter[RecordedDraft] = Counter()
    for one in each:
        if one is not None:
            tokens[one.draft] += one.tokens
            passes[one.draft] += one.passes
    return [Drafting(draft=draft, tokens=tokens[draft], passes=passes[draft]) for draft in tokens]
