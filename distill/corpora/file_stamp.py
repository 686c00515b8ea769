"""Whether a corpus in files may have changed, told without reading them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from distill.config import DataConfig
from distill.corpora.text_files import stdlib_files


def file_stamp(config: DataConfig) -> str | None:
    """SHA-256 of the names, sizes and times of change of the files that a corpus is read from; None for one on the hub,
    which has none here."""
    if config.name == "hub":
        return None
    if config.path is None:
        root, files = stdlib_files()
    else:
        root = Path(config.path)
        files = [root] if root.is_file() else [one for one in root.rglob("*") if one.is_file()]
    return _stamp(files, root)


def _stamp(files: Iterable[Path], root: Path) -> str:
    sha = hashlib.sha256()
    for file in sorted(files):
        found = file.stat()
        sha.update(json.dumps([str(file.relative_to(root)), found.st_size, found.st_mtime_ns]).encode())
    return sha.hexdigest()
