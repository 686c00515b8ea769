"""A safetensors file whose arrays are known beforehand, opened without reading them; checksums of single arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from decode.common.errors import InputError
from distill.records.feature_codes import Shapes

CODES = {"U8": np.uint8, "U16": np.uint16, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
         "F16": np.float16, "F32": np.float32}  # fmt: skip


def open_arrays(path: Path, wanted: Shapes, remedy: str) -> Any:
    """The open file (`get_tensor`, `get_slice`); -1 in a wanted shape is any number.

    Raises InputError for a damaged header, offsets that do not fit the file, and arrays of other names, types or
    shapes.
    """
    try:
        file = safe_open(str(path), framework="np")
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: its header is damaged ({error}), so no array of it can be found. {remedy}"
        ) from error
    for name in sorted({*wanted, *found}):
        if name not in found or name not in wanted or not _fits(found[name], wanted[name]):
            raise InputError(
                f"{path} holds {name} as {found.get(name, 'no array at all')}, and {_told(wanted.get(name))} is wanted "
                f"by the manifest: its rows would be read as others. {remedy}"
            )
    return file


AT_ONCE = 1 << 20


def array_sums(file: BinaryIO, names: Collection[str] | None = None) -> dict[str, str]:
    """SHA-256 of the bytes of these arrays, None is all, in a file whose header is sound; nothing else is read."""
    places = array_places(file)
    return {name: _sum(file, *places[name]) for name in (places if names is None else names)}


def array_places(file: BinaryIO) -> dict[str, tuple[int, int]]:
    """Where the bytes of each array begin and end."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    told = json.loads(file.read(size))
    offsets = {name: one["data_offsets"] for name, one in told.items() if name != "__metadata__"}
    return {name: (8 + size + begin, 8 + size + end) for name, (begin, end) in offsets.items()}


def _sum(file: BinaryIO, begin: int, end: int) -> str:
    sha = hashlib.sha256()
    file.seek(begin)
    for place in range(begin, end, AT_ONCE):
        sha.update(file.read(min(AT_ONCE, end - place)))
    return sha.hexdigest()


def _fits(found: tuple[tuple[int, ...], str], wanted: tuple[tuple[int, ...], np.dtype]) -> bool:
    shape, dtype = wanted
    sizes = len(shape) == len(found[0]) and all(b in (a, -1) for a, b in zip(found[0], shape, strict=True))
    return sizes and CODES.get(found[1]) == dtype


def _told(wanted: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "none" if wanted is None else f"{wanted[0]} of {wanted[1]}"
