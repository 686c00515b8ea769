"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` so that `path` appears once all of it is on the disk; a killed writer leaves a hidden file."""
    # process ids do not tell processes apart: in containers that share a disk they are often the same
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a full disk would not get emptier by what is left
        temporary.unlink(missing_ok=True)
        raise
