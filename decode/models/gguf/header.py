"""The header of a GGUF file, in milliseconds: the package gguf takes seconds for the vocabulary, which is skipped here
until somebody asks for it. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its format; the others are texts and lists."""
TEXT, LIST = 8, 9
ALIGNMENT = 32


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]
    """In torch's order."""
    kind: int
    """As ggml numbers types of blocks and values."""
    offset: int
    """Bytes from where the tensors begin."""

    @property
    def block(self) -> tuple[int, int]:
        """Values of a block, and its bytes; ValueError for a type that the package gguf does not know."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        return GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]

    @property
    def size(self) -> int:
        """Bytes of it."""
        values, size = self.block
        return prod(self.shape) // values * size


@dataclass(frozen=True)
class Header:
    """What stands before the tensors."""

    metadata: dict[str, Any]
    """By key; of a list of texts its length."""
    tensors: tuple[StoredTensor, ...]
    begin: int
    """Where the tensors begin, in bytes."""
    alignment: int
    """Each begins at a multiple of so many bytes."""
    lists: dict[str, int]
    """Where the texts of a list begin, by key, in bytes."""


def read_header(path: Path) -> Header:
    """Of a file of GGUF version 2 or 3, little-endian; struct.error or ValueError where it is none or ends early."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        reader = _Reader(content, at=8)
        tensors, pairs = reader.take("QQ")
        metadata, lists = dict[str, Any](), dict[str, int]()
        for _ in range(pairs):
            name, kind = reader.text(), reader.take("I")[0]
            begin = reader.at + struct.calcsize("<IQ")
            metadata[name] = reader.value(kind)
            if kind == LIST and isinstance(metadata[name], int):
                lists[name] = begin
        found = tuple(reader.tensor() for _ in range(tensors))
        aligned = int(metadata.get("general.alignment", ALIGNMENT))
        return Header(metadata, found, -(-reader.at // aligned) * aligned, aligned, lists)


def read_texts(path: Path, header: Header, key: str) -> list[str]:
    """A list of texts of the metadata."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        reader = _Reader(content, header.lists[key])
        return [reader.text() for _ in range(header.metadata[key])]


@dataclass
class _Reader:
    content: mmap.mmap
    at: int

    def take(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        found = struct.unpack_from(form, self.content, self.at)
        self.at += struct.calcsize(form)
        return found

    def skip_text(self) -> slice:
        (length,) = self.take("Q")
        self.at += length
        if self.at > len(self.content):
            raise ValueError(f"a text of {length} bytes goes beyond the end")
        return slice(self.at - length, self.at)

    def text(self) -> str:
        return self.content[self.skip_text()].decode()

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            return self.list_of(*self.take("IQ"))
        return self.take(_form(kind))[0]

    def list_of(self, kind: int, count: int) -> Any:
        if kind != TEXT:
            return list(self.take(f"{count}{_form(kind)}"))
        for _ in range(count):
            self.skip_text()
        return count

    def tensor(self) -> StoredTensor:
        name = self.text()
        (axes,) = self.take("I")
        shape = self.take(f"{axes}Q")[::-1]
        kind, offset = self.take("IQ")
        return StoredTensor(name, shape, kind, offset)


def _form(kind: int) -> str:
    if kind not in FIXED:
        raise ValueError(f"there is no type {kind} of values")
    return FIXED[kind]
