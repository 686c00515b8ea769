"""Documents and their split, which depends on nothing but the document itself, so that every stage draws the same
line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeVar

from decode.common.errors import InputError
from distill.config import DataConfig

Split = Literal["train", "validation", "heldout"]
Message = dict[str, str]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Document:
    """One document: plain text or chat messages, never both."""

    id: str
    text: str | None = None
    messages: list[Message] | None = None
    category: str | None = None
    made_from: str | None = None
    """Text of the file that this was made from, where it was: the file decides the split, so that nothing made from a
    held-out one is trained on."""


def unit_hash(*parts: object) -> float:
    """A number in [0, 1) that is a pure function of `parts`, the same on every machine and in every process."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_of(document: Document, config: DataConfig) -> Split:
    """The split of a document, by the hash of its text (of what it was made from), or of the first question of its
    conversation.

    Not by its id: the same text under two ids (web data repeats itself) would be trained on and held out at once.
    """
    messages = document.messages or []
    asked = [message["content"] for message in messages if message["role"] == "user"]
    text = document.made_from or document.text or next(iter(asked), str(messages))
    place = unit_hash("split", text.strip())
    if place < config.heldout_share:
        return "heldout"
    return "validation" if place < config.heldout_share + config.validation_share else "train"


class EmptySplitError(InputError):
    """There are documents, and none of them falls into the split."""


@dataclass(frozen=True)
class Corpus:
    """Documents of one source; `read` starts from the first one at every call."""

    config: DataConfig
    where: str
    """The source in words, for messages."""
    read: Callable[[], Iterator[Document]]

    def documents(self, split: Split) -> Iterator[Document]:
        """The documents of `split` in the source's order; raises InputError where the source or the split is empty."""
        seen = kept = 0
        for document in islice(self.read(), self.config.max_documents):
            seen += 1
            if split_of(document, self.config) == split:
                kept += 1
                yield document
        if not seen:
            raise InputError(f"{self.where}: no document with text in it, so there is nothing to read")
        if not kept:
            raise EmptySplitError(self._empty_split(split, seen))

    def _empty_split(self, split: Split, seen: int) -> str:
        shares = f"data.validation_share={self.config.validation_share}, data.heldout_share={self.config.heldout_share}"
        return (
            f"{self.where}: none of its {seen} documents falls into the {split} split ({shares}; documents are split "
            "by the hash of their text). Use more documents or other shares"
        )


def in_groups(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items, the last one shorter (itertools.batched came with Python 3.12 only)."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group
