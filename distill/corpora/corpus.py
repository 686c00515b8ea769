"""Documents and their split, which depends on nothing but the document itself, so that every stage draws the same
line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal, TypeVar

from decode.common.errors import InputError
from distill.corpora.bad_rows import BadRow, BadRows
from distill.corpora.config import DataConfig
from distill.corpora.messages import Message

Split = Literal["train", "validation", "heldout"]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Document:
    """One document: plain text or chat messages, never both."""

    id: str
    text: str | None = None
    messages: list[Message] | None = None
    category: str | None = None
    place: float | None = None
    """`split_place` of the text that this was made from, which decides its split: nothing made from a held-out file is
    trained on. None is by its own text."""
    where: str = ""
    """File and line or row, for messages; the id where nothing better is known."""
    is_cut: bool = False
    """Whether the assistant's words before the first question were dropped."""

    def __post_init__(self) -> None:
        if not self.where:
            object.__setattr__(self, "where", self.id)


def unit_hash(*parts: object) -> float:
    """A number in [0, 1) that is a pure function of `parts`, the same on every machine and in every process."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_place(text: str) -> float:
    """Where a text lies in [0, 1), for the shares of the splits; blanks around it make no other text of it."""
    return unit_hash("split", text.strip())


def split_of(document: Document, config: DataConfig) -> Split:
    """The split of a document, by the hash of its text, of what it was made from, or of the first question of its
    conversation.

    Not by its id: the same text under two ids (web data repeats itself) would be trained on and held out at once.
    """
    place = document.place
    if place is None:
        place = split_place(document.text or first_question(document) or str(document.messages or []))
    if place < config.heldout_share:
        return "heldout"
    return "validation" if place < config.heldout_share + config.validation_share else "train"


def first_question(document: Document) -> str | None:
    """Of a conversation; None where nobody asks."""
    return next((one["content"] for one in document.messages or [] if one["role"] == "user"), None)


class EmptySplitError(InputError):
    """There are documents, and none of them falls into the split."""


@dataclass(frozen=True)
class Corpus:
    """Documents of one source; `read` starts from the first one at every call, and gives a BadRow for a row that is
    none."""

    config: DataConfig
    where: str
    """The source in words, for messages."""
    read: Callable[[], Iterator[Document | BadRow]]

    @cached_property
    def bad(self) -> BadRows:
        """The rows that were left out so far, whichever split was read."""
        return BadRows(self.where, self.config.bad_rows)

    def everything(self) -> Iterator[Document]:
        """The documents of all splits in the source's order, max_documents at most; bad rows are counted."""
        most, found = self.config.max_documents, 0
        for number, row in enumerate(self.read(), 1):
            self.bad.rows = max(self.bad.rows, number)
            if isinstance(row, BadRow):
                self.bad.add(row)
                continue
            if row.is_cut:
                self.bad.cut(row.where)
            found += 1
            yield row
            if found == most:
                return

    def documents(self, split: Split) -> Iterator[Document]:
        """The documents of `split` in the source's order; raises InputError where the source or the split is empty, or
        more than data.bad_rows of its rows are bad."""
        seen = kept = 0
        for document in self.everything():
            seen += 1
            if split_of(document, self.config) == split:
                kept += 1
                yield document
        self.bad.check()
        if not seen:
            raise InputError(f"{self.where}: no document with text in it, so there is nothing to read")
        if not kept:
            raise EmptySplitError(self._empty_split(split, seen))

    def _empty_split(self, split: Split, seen: int) -> str:
        shares = f"data.validation_share={self.config.validation_share}, data.heldout_share={self.config.heldout_share}"
        wanted = min(0.5, max(0.1, 3 / seen))  # of which one in twenty corpora would have none
        return (
            f"{self.where}: none of its {seen} documents falls into the {split} split ({shares}; documents are split "
            f"by the hash of their text). Use more documents, or for example data.{split}_share={wanted:.2g}"
            if split != "train"
            else f"{self.where}: none of its {seen} documents is left for the train split ({shares}). Use more "
            "documents or smaller shares"
        )


def or_bad(documents: Iterator[Document]) -> Iterator[Document | BadRow]:
    """`documents`, or what is wrong with the row that they are of; what reads the rows goes on with the next one."""
    try:
        yield from documents
    except BadRow as bad:
        yield bad


def in_groups(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items, the last one shorter (itertools.batched came with Python 3.12 only)."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group
