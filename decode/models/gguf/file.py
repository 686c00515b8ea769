"""A model in one GGUF file: what its header says, and whether it can be read at all; told without reading a weight."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.common.errors import InputError
from decode.common.extras import extra, require_installed
from decode.models.gguf.header import Header, StoredTensor, read_header, read_texts

FREQUENCIES = "rope_freqs.weight"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
BROKEN = (struct.error, ValueError, KeyError, OverflowError, MemoryError, ZeroDivisionError)
"""What the reader raises where a file ends early, or counts and lengths are none."""
AGAIN = "Fetch the file again"
OTHERWISE = "Quantise the model to another type, Q4_K or Q8_0 say, or give its folder in transformers format"
VALUES = {0: "float32", 1: "float16", 30: "bfloat16"}
"""Types of values, which are no blocks."""


@dataclass(frozen=True)
class GgufFile:
    """The header of a file that can be read."""

    path: Path
    header: Header

    @property
    def metadata(self) -> dict[str, Any]:
        """By key; of a list of texts its length."""
        return self.header.metadata

    @property
    def architecture(self) -> str:
        """As llama.cpp calls it."""
        return str(self.metadata["general.architecture"])

    @cached_property
    def dtype(self) -> str:
        """Precision that it was saved in: of whole tables of values the coarsest; blocks are products of float32
        numbers."""
        kinds = {VALUES.get(one.kind, "blocks") for one in self.header.tensors}
        halves = kinds & {"bfloat16", "float16"}
        return "float32" if "blocks" in kinds or not halves else min(halves)

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """By name."""
        return {one.name: one for one in self.header.tensors}

    @property
    def padding(self) -> int | None:
        """The token, which stands in no text; None where it is none of the vocabulary (-1 as 2^32 - 1, say), as
        llama.cpp has it."""
        found = self.metadata.get("tokenizer.ggml.padding_token_id")
        return found if isinstance(found, int) and found < self.metadata.get("tokenizer.ggml.tokens", 0) else None

    def texts(self, key: str) -> list[str]:
        """Those of a list in the metadata; none where there is no such list."""
        return read_texts(self.path, self.header, key) if key in self.header.lists else []

    def values(self, name: str) -> Tensor | None:
        """Those of a tensor of float32; None where there is none of that name."""
        found = self.tensors.get(name)
        if found is None or VALUES.get(found.kind) != "float32":
            return None
        return torch.from_numpy(
            np.fromfile(self.path, np.float32, found.size // 4, offset=self.header.begin + found.offset)
        )


def open_gguf(path: str | Path, role: str) -> GgufFile:
    """The header of the file; ConfigError without the package gguf, InputError for a file that is none, one of another
    version or byte order, one part of several, one that ends early, and for weights of a type that cannot be read."""
    file = Path(path)
    _check_beginning(file, role)
    remedy = f"Install it, {extra('gguf')}, or give a folder in transformers format"
    require_installed("gguf", f"{role}.path={path}, a GGUF file,", remedy)
    status = file.stat()
    return _read(file, status.st_size, status.st_mtime_ns, role)


@lru_cache(maxsize=8)
def _read(file: Path, size: int, changed_ns: int, role: str) -> GgufFile:
    try:
        found = GgufFile(file, read_header(file))
    except BROKEN as error:
        raise InputError(
            f"the header of {role}.path={file} cannot be read ({type(error).__name__}: {str(error)[:160]}): the file "
            f"is damaged, or was cut off within its header, at {size} bytes. {AGAIN}"
        ) from error
    _check_alone(found, role)
    _check_types(found, role)
    _check_places(found, role)
    _check_size(found, size, role)
    return found


def _check_beginning(file: Path, role: str) -> None:
    with file.open("rb") as stream:
        first = stream.read(8)
    if first[:4] != MAGIC:
        raise InputError(
            f"{role}.path={file} is no GGUF file: it begins with {first[:4]!r}, and a GGUF file with {MAGIC!r}. A "
            "model is a folder in transformers format, a GGUF file or a hub id"
        )
    version = int.from_bytes(first[4:], "little")
    swapped = int.from_bytes(first[4:], "big")
    if len(first) < 8:
        raise InputError(f"{role}.path={file} ends after {len(first)} bytes, within its header. {AGAIN}")
    if swapped < 1 << 16 <= version:
        raise InputError(
            f"{role}.path={file} was written for big-endian machines (GGUF version {swapped}), and its numbers would "
            "be read backwards. Convert it: gguf-convert-endian FILE little"
        )
    if version not in VERSIONS:
        raise InputError(
            f"{role}.path={file} is of GGUF version {version}, and versions {' and '.join(map(str, VERSIONS))} are "
            "read here. Fetch or convert the model in one of them, or update draftsmith and transformers"
        )


def _check_alone(found: GgufFile, role: str) -> None:
    parts, kind = found.metadata.get("split.count", 1), found.metadata.get("general.type", "model")
    if parts > 1 or PART.search(found.path.name):
        raise InputError(
            f"{role}.path={found.path} is one part of {parts}, and a model is read from one file. Put them together: "
            "llama-gguf-split --merge FIRST_PART WHOLE.gguf"
        )
    if kind != "model" or "general.architecture" not in found.metadata:
        raise InputError(
            f"{role}.path={found.path} holds no language model: its general.type is {kind!r}, and its "
            f"general.architecture {found.metadata.get('general.architecture')!r}. Give the file of the model itself"
        )


def _check_types(found: GgufFile, role: str) -> None:
    unread = sorted({one.kind for one in found.header.tensors if not _is_readable(one.kind)})
    if unread:
        raise InputError(
            f"{role}.path={found.path} holds weights of the types {', '.join(map(_name_of, unread))}, which the "
            f"package gguf does not turn into numbers. {OTHERWISE}"
        )


def _check_places(found: GgufFile, role: str) -> None:
    """What the numbers of a damaged header would be read as, without a word or only when weights are loaded."""
    step = found.header.alignment
    for one in found.header.tensors:
        (values, _), width = one.block, one.shape[-1] if one.shape else 1
        if width % values:
            wrong = f"rows of {width} values as {_name_of(one.kind)}, whose blocks have {values}"
        elif one.offset % step:
            wrong = f"its values at byte {one.offset}, which is no multiple of the alignment, {step}"
        else:
            continue
        raise InputError(
            f"{role}.path={found.path} is damaged: {one.name} has by its header {wrong}, and other numbers than the "
            f"model's would be read. {AGAIN}"
        )


def _check_size(found: GgufFile, size: int, role: str) -> None:
    ends = [found.header.begin + one.offset + one.size for one in found.header.tensors]
    wanted = max(ends, default=found.header.begin)
    if size < wanted:
        raise InputError(
            f"{role}.path={found.path} has {size} bytes, and by its header it should have {wanted}: it was cut off, "
            f"and {sum(end > size for end in ends)} of its {len(ends)} tensors are not whole. {AGAIN}"
        )


@lru_cache
def _is_readable(kind: int) -> bool:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    try:
        known = GGMLQuantizationType(kind)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), known)
    except (NotImplementedError, ValueError, KeyError):
        return False
    return True


def _name_of(kind: int) -> str:
    from gguf import GGMLQuantizationType

    return next((one.name for one in GGMLQuantizationType if one == kind), f"number {kind}")
