"""metrics.jsonl, written and read back: a line per event, kept in step with the checkpoints, so that a resumed log has
no gap and no repeat."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from decode.common.checked_json import Content, Count, JsonFile, Text
from decode.common.errors import InputError

METRICS = "metrics.jsonl"


class Line(Content):
    """An event, with whatever was measured then."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[float, Field(allow_inf_nan=True)] | int | Text | None]

    kind: Text
    step: Count


LINE = JsonFile(
    Line,
    "the curve and the pace of the training would be another's",
    "The run's log is damaged: copy it again, or train again.",
)


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


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; InputError names a damaged one."""
    lines = enumerate(file.read_bytes().splitlines(), start=1)
    return [LINE.parse(line, f"{file}:{number}").model_dump() for number, line in lines]
