"""Whether a file of a record folder is the one that the manifest names: by its size when the folder is opened, by its
bytes when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from decode.common.checked_json import file_within
from decode.common.errors import InputError
from decode.common.run_folder import sha256_file
from distill.records.record_manifest import REMEDY, FileSummary
from distill.records.safetensors_file import array_sums


def described(file: Path) -> FileSummary:
    """What a manifest says of a file."""
    return FileSummary(file=file.name, bytes=file.stat().st_size, sha256=sha256_file(file))


def check_size(folder: Path, known: FileSummary) -> Path:
    """The file; InputError where it is missing, lies outside of the folder, or has another size. None of it is read."""
    file = file_within(folder, known.file, REMEDY)
    if not file.is_file():
        raise InputError(f"{file} is missing, and its folder's manifest names it. {REMEDY}")
    size = file.stat().st_size
    if size != known.bytes:
        raise InputError(f"{file} has {size} bytes, and the manifest says {known.bytes}: it was cut short. {REMEDY}")
    return file


def check_sum(file: Path, known: FileSummary) -> None:
    """Raise InputError where its bytes are others; all of them are read."""
    found = sha256_file(file)
    if found != known.sha256:
        raise InputError(
            f"{file} has SHA-256 {found}, and the manifest says {known.sha256}: its bytes changed. {REMEDY}"
        )


def check_arrays(file: Path, known: Mapping[str, str]) -> None:
    """Raise InputError where the bytes of these arrays are others; no others are read."""
    with file.open("rb") as opened:
        found = array_sums(opened, known)
    for name, now in found.items():
        if now != known[name]:
            raise InputError(
                f"{file}: {name} has SHA-256 {now}, and the manifest says {known[name]}: its bytes changed. {REMEDY}"
            )
