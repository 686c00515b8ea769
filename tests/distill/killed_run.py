"""`python -m tests.distill.killed_run FOLDER [WHERE N]`: the tiny run, killed as it comes to WHERE the N-th time."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from decode.common import checked_json
from distill import responses, stage
from distill.config import DataConfig
from distill.corpora import Document, configured
from distill.corpora.bad_rows import BadRow
from distill.records import record_folder as records
from distill.records.record_manifest import ShardSummary
from distill.records.record_shards import Record
from distill.stage import run
from tests.distill.runs import kept, tiny_config

PLACES = {
    "shard": (os, "fsync"),  # the shard's bytes are written, its name is not there yet
    "note": (checked_json, "write_json"),  # the shard is there, its checksum is not
    "response": (responses, "generate"),
    "code": (stage, "write_atomically"),  # the code of hidden states is fitted, its file is not there yet
    "shard_begins": (records, "shard_bytes"),
}


def kill_at(place: str, times: int) -> None:
    """Replace the function at `place` by one that kills this process on its `times`-th call."""
    module, name = PLACES[place]
    function: Callable[..., Any] = getattr(module, name)
    calls = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    setattr(module, name, counted)


def note_shards(folder: Path) -> None:
    """Let every shard that this process writes leave a line `rank index` in `folder`/written.txt."""
    write = records.RecordWriter.write

    def noted(self: records.RecordWriter, index: int, records: Sequence[Record]) -> ShardSummary:
        with (folder / "written.txt").open("a") as file:
            file.write(f"{os.environ.get('RANK', '0')} {index}\n")
        return write(self, index, records)

    records.RecordWriter.write = noted


def note_reads(folder: Path) -> None:
    """Let every pass over the corpus leave a line `rank` in `folder`/read.txt."""
    read = configured.FILE_READERS["jsonl"]

    def noted(path: Path, config: DataConfig) -> Iterator[Document | BadRow]:
        with (folder / "read.txt").open("a") as file:
            file.write(f"{os.environ.get('RANK', '0')}\n")
        yield from read(path, config)

    configured.FILE_READERS["jsonl"] = noted


if __name__ == "__main__":
    if len(sys.argv) > 2:
        kill_at(sys.argv[2], int(sys.argv[3]))
    note_shards(Path(sys.argv[1]))
    note_reads(Path(sys.argv[1]))
    run(tiny_config(Path(sys.argv[1]), resume="auto", records=kept("pca")))
