"""A file of one text's hidden states that an engine writes, waited for, read and removed.

vLLM's connector holds a lock on FILE.lock until the states are written, or until writing them failed.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from decode.common.errors import RunError

_LOOK_S = 0.005


def _is_held(lock: Path) -> bool:
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # not there, or a file system without locks
        return False
    return False


def _is_whole(file: Path) -> bool:
    """By the length that its header calls for: a full disk leaves a beginning."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = opened.read(size)
        if len(header) < size or not size:
            return False
        ends = [one["data_offsets"][1] for name, one in json.loads(header).items() if name != "__metadata__"]
        return file.stat().st_size == 8 + size + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def await_states(file: Path, patience: float, timeout: float) -> bool:
    """Whether `file` is there and whole: as soon as it is, or `patience` seconds after nobody writes it any more. False
    as well after `timeout` seconds in all."""
    began = last_held = time.monotonic()
    while True:
        held, now = _is_held(_lock(file)), time.monotonic()
        if not held and _is_whole(file):
            return True
        last_held = now if held else last_held
        if now - last_held > patience or now - began > timeout:
            return False
        time.sleep(_LOOK_S)


def take_states(file: Path) -> dict[str, Tensor]:
    """`token_ids` (L,) and `hidden_states` (L, layers, d), whose file is then removed. Raises RunError for a file that
    was not written, or not to its end."""
    try:
        if not _is_whole(file):
            raise RunError(_unwritten(file))
        found = load_file(file)
        remove_states(file)
    except (OSError, SafetensorError) as error:
        raise RunError(f"the hidden states in {file} cannot be read and removed: {error}") from error
    return found


def remove_states(file: Path) -> None:
    """The file and its lock."""
    file.unlink(missing_ok=True)
    _lock(file).unlink(missing_ok=True)


def _lock(file: Path) -> Path:
    return Path(f"{file}.lock")


def _unwritten(file: Path) -> str:
    folder = file.parent
    there = next(one for one in (folder, *folder.parents) if one.exists())
    free = shutil.disk_usage(there).free
    return (
        f"vLLM did not write the hidden states of a text to {file} ({free / 1e6:,.0f} MB free; see its log). Make "
        "room, or take an output_dir (of a server: a shared_storage_path) on another disk, and give resume=auto"
    )
