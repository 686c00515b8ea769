"""Reads an offline W&B file back: a 7-byte header, then records in LevelDB's log format (blocks of 32 KiB)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER_BYTES, BLOCK_BYTES, CHUNK_HEADER_BYTES = 7, 1 << 15, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(file: Path) -> Iterator[Any]:
    """wandb_internal_pb2.Record messages, in order."""
    from wandb.proto import wandb_internal_pb2

    for content in _contents(file.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(content)
        yield record


def _contents(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    place, parts = HEADER_BYTES, b""
    while place + CHUNK_HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < CHUNK_HEADER_BYTES:  # too little for another chunk: the rest of the block is padding
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + CHUNK_HEADER_BYTES])
        if kind == 0:
            place += left
            continue
        start = place + CHUNK_HEADER_BYTES
        place = start + length
        parts = data[start:place] if kind in (FULL, FIRST) else parts + data[start:place]
        if kind in (FULL, LAST):
            yield parts
