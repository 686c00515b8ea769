"""Datasets of the `datasets` library: saved to disk, a folder of data files, or on the hub; streamed if asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decode.common.errors import InputError
from distill.corpora.bad_rows import BadRow
from distill.corpora.config import DataConfig
from distill.corpora.corpus import Document
from distill.corpora.row_files import table_row

SAVED_MARKS = ("state.json", "dataset_dict.json")  # what `save_to_disk` leaves


def dataset_rows(config: DataConfig) -> Iterator[Document | BadRow]:
    """The rows of the dataset at `config.path`; raises InputError where it cannot be loaded."""
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowException

    try:
        rows = _load(config)
    except (DatasetsError, OSError, ValueError) as error:
        raise InputError(
            f"data.path={config.path} (subset {config.subset}, split {config.hub_split}) cannot be loaded: {error}"
            f"{_remedy(config)}"
        ) from error
    number = 0
    try:
        for row in rows:
            number += 1
            yield from table_row(row, f"{config.path}, row {number}", str(number), config)
    except (DatasetsError, ArrowException, OSError) as error:  # a streamed one is read here
        raise InputError(
            f"data.path={config.path} cannot be read after row {number}: {error}{_remedy(config)}"
        ) from error


def _remedy(config: DataConfig) -> str:
    here = Path(str(config.path)).is_dir()
    return ". If a line of its files is broken, data=jsonl with the same data.path leaves it out" if here else ""


def _load(config: DataConfig) -> Any:
    import datasets

    assert config.path is not None
    if any((Path(config.path) / mark).is_file() for mark in SAVED_MARKS):
        saved = datasets.load_from_disk(config.path)
        return (
            saved[_choose([str(name) for name in saved], config)] if isinstance(saved, datasets.DatasetDict) else saved
        )
    names = datasets.get_dataset_split_names(config.path, config.subset, revision=config.revision)
    return datasets.load_dataset(
        config.path,
        config.subset,
        split=_choose([str(name) for name in names], config),
        streaming=config.streaming,
        revision=config.revision,
    )


def _choose(names: list[str], config: DataConfig) -> str:
    """The split to read among `names`: the one asked for, else `train`, else the first whose name starts with it."""
    wanted = config.hub_split
    fitting = [name for name in names if name == (wanted or "train")]
    if wanted is None:
        fitting += [name for name in names if name.startswith("train")]
    if not fitting:
        raise InputError(
            f"{config.path} has no split {wanted or 'train'!r}; it has {', '.join(names)}. Set data.hub_split to one "
            "of them"
        )
    return fitting[0]
