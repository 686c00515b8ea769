"""A writer killed at any instant and resumed ends with the very files of an uninterrupted run."""

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState

from decode.common import checked_json
from decode.common.checked_json import read_json
from distill import responses, stage
from distill.corpora import configured
from distill.corpora.bad_rows import BadRow
from distill.corpora.config import DataConfig
from distill.corpora.corpus import Document
from distill.records import record_folder as records
from distill.records.record_folder import RecordFolder
from distill.records.record_manifest import ShardSummary
from distill.records.record_shards import Record
from distill.stage import run
from tests.distill.runs import kept, shard_files, tiny_config

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


def start(folder: Path, *where: str, **environment: str) -> int:
    """The tiny run in a process of its own, killed as it comes to WHERE the N-th time; its id.

    Forked: nothing is imported again, and the parent has one thread."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        PartialState._reset_state()  # the parent's says that it is alone
        os.environ.update(environment)
        if where:
            kill_at(where[0], int(where[1]))
        note_shards(folder)
        note_reads(folder)
        run(tiny_config(folder, resume="auto", records=kept("pca")))
        code = 0
    finally:
        os._exit(code)


def ended(process: int) -> int:
    """Its exit code; of a killed one the signal, below zero."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.parametrize(
    ("places", "anywhere"),
    [
        ([("response", "3")], False),
        pytest.param([("code", "1"), ("response", "3"), ("shard", "3"), ("note", "2")], True, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_records_equal_uninterrupted_ones(
    tmp_path: Path, places: list[tuple[str, str]], anywhere: bool
) -> None:
    config = tiny_config(tmp_path, "whole", records=kept("pca"))
    run(config)
    expected = shard_files(config.output_dir)
    for where in places:
        assert ended(start(tmp_path, *where)) == -signal.SIGKILL
        with pytest.raises(Exception, match=r"resume=auto|no such record folder"):
            RecordFolder.open(tmp_path / "records")
    shards = tmp_path / "records/shards"
    if anywhere:
        assert {file.stem for file in shards.glob("*.safetensors")} > {file.stem for file in shards.glob("*.json")}
        process = start(tmp_path)
        time.sleep(random.Random(0).uniform(0.1, 2))  # wherever that is: start, loading, a shard, or after the end
        os.kill(process, signal.SIGKILL)
        ended(process)
    assert ended(start(tmp_path)) == 0
    assert shard_files(tmp_path / "records") == expected
    ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("records", "whole"))
    assert ours["shards"] == theirs["shards"]
    assert ours["counts"] == theirs["counts"]
    RecordFolder.open(tmp_path / "records")


def test_two_ranks_write_the_records_of_one(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "whole", records=kept("pca"))
    run(config)
    with socket.create_server(("127.0.0.1", 0)) as free:
        ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = [start(tmp_path, RANK=str(rank), LOCAL_RANK=str(rank), **ranks) for rank in range(2)]
    assert [ended(process) for process in processes] == [0, 0]
    written = sorted((tmp_path / "written.txt").read_text().split("\n")[:-1])
    assert written == ["0 0", "0 2", "1 1", "1 3"]  # each rank its own shards, none twice
    assert (tmp_path / "read.txt").read_text() == "0\n0\n0\n"  # two splits, and what is held out, by rank 0 alone
    assert shard_files(tmp_path / "records") == shard_files(config.output_dir)
    RecordFolder.open(tmp_path / "records")
