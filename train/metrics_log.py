"""metrics.jsonl: a line per event, kept in step with the checkpoints: a resumed log has no gap and no repeat."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from decode.common.errors import InputError


class MetricsLog:
    """Appends lines; `position` is stored with a checkpoint, and a resumed run cuts the file back to it."""

    def __init__(self, path: Path, position: int = 0) -> None:
        """Raises InputError where the file is shorter than `position`: it is not the log of that checkpoint."""
        size = path.stat().st_size if path.exists() else 0
        if size < position:
            raise InputError(
                f"{path} has {size} bytes, and the checkpoint to resume from was made at byte {position}: lines are "
                "missing. Restore the file, or start again in another output_dir"
            )
        path.touch()
        self.file = path.open("r+b")
        self.file.truncate(position)
        self.file.seek(position)

    @property
    def position(self) -> int:
        """Bytes written, all of them on disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; readers see it at once."""
        self.file.write(json.dumps(record).encode() + b"\n")
        self.file.flush()

    def close(self) -> None:
        """End of the run."""
        self.file.close()
