"""From a configuration to a corpus; a missing path fails here, before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from decode.common.errors import InputError
from decode.common.extras import extra, require_installed
from distill.corpora.bad_rows import BadRow
from distill.corpora.config import DataConfig
from distill.corpora.corpus import Corpus, Document
from distill.corpora.everyday import everyday_chats
from distill.corpora.hub_datasets import dataset_rows
from distill.corpora.row_files import JSON_SUFFIXES, jsonl_rows, parquet_rows
from distill.corpora.tasks import task_documents
from distill.corpora.text_files import python_stdlib, text_files

FILE_READERS: dict[str, Callable[[Path, DataConfig], Iterator[Document | BadRow]]] = {
    "text": lambda path, _: text_files(path),
    "jsonl": jsonl_rows,
    "parquet": parquet_rows,
    "tasks": lambda path, _: task_documents(text_files(path)),
}
NEEDS = {"parquet": "pyarrow", "dataset": "datasets", "hub": "datasets"}
"""DataConfig.name -> package of the extra `train`."""


def load_corpus(config: DataConfig) -> Corpus:
    """The corpus of `config`; raises InputError where its path does not exist, and ConfigError where its format needs a
    package that is not installed. Rows are read as documents are asked for."""
    if config.name == "python_stdlib":
        return Corpus(config, "the Python standard library", python_stdlib)
    if config.name == "everyday":
        return Corpus(config, "the chats that come with draftsmith", everyday_chats)
    if config.name == "tasks" and config.path is None:
        return Corpus(config, "the Python standard library", lambda: task_documents(python_stdlib()))
    assert config.path is not None
    if config.name != "hub" and not Path(config.path).exists():
        raise InputError(f"data.path={config.path} does not exist; give the {config.name} file or folder to read")
    reader = _reader(config)
    if reader in NEEDS:
        remedy = f"Install it, {extra('train')}, or use data=jsonl or data=text"
        require_installed(NEEDS[reader], f"data={config.name}", remedy)
    if reader in FILE_READERS:
        return Corpus(config, config.path, partial(FILE_READERS[reader], Path(config.path), config))
    return Corpus(config, config.path, partial(dataset_rows, config))


def _reader(config: DataConfig) -> str:
    """What reads the corpus: of a single file of rows, its format, whatever the preset says of the dataset's copies."""
    path = Path(str(config.path))
    if config.name in ("jsonl", "parquet", "dataset", "hub") and path.is_file():
        if path.suffix == ".parquet":
            return "parquet"
        if path.name.endswith(JSON_SUFFIXES):
            return "jsonl"
    return config.name
