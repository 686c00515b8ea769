"""Rows of JSONL and parquet files, and what makes a row of any source a document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from decode.common.errors import InputError
from distill.config import DataConfig
from distill.corpora.corpus import Document, Message

SHAREGPT_FIELD = "conversations"
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def jsonl_rows(path: Path, config: DataConfig) -> Iterator[Document]:
    """One JSON object a line; raises InputError naming file and line for anything else."""
    for file in _files(path, (".jsonl", ".json")):
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    where = f"{file}, line {number}"
                    yield from row_document(_parse(line, where), where, f"{file.name}:{number}", config)


def parquet_rows(path: Path, config: DataConfig) -> Iterator[Document]:
    """The rows of parquet files; raises InputError naming the file where it is not one."""
    import pyarrow
    import pyarrow.parquet

    for file in _files(path, (".parquet",)):
        try:
            table = pyarrow.parquet.ParquetFile(file)
        except pyarrow.ArrowInvalid as error:
            raise InputError(f"{file}: no parquet file ({error})") from error
        number = 0
        try:
            for row in (row for batch in table.iter_batches(batch_size=256) for row in batch.to_pylist()):
                number += 1
                yield from row_document(row, f"{file}, row {number}", f"{file.name}:{number}", config)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{file}, after row {number}: damaged ({error}). Write or copy it again") from error


def row_document(row: Any, where: str, default_id: str, config: DataConfig) -> Iterator[Document]:
    """The document of a row, or nothing where it is blank; InputError names `where`, file and line of a bad row."""
    if not isinstance(row, Mapping):
        raise InputError(f"{where}: a JSON object is wanted, and this is {type(row).__name__}")
    if config.id_field is not None and row.get(config.id_field) is None:
        raise InputError(f"{where}: no field data.id_field={config.id_field!r}; its fields are {_names(row)}")
    identity = default_id if config.id_field is None else checked_text(str(row[config.id_field]), where)
    category = row.get("category")
    category = None if category is None else checked_text(str(category), where)
    messages = _conversation(row, config)
    if messages is not None:
        yield Document(identity, messages=_messages(messages, where), category=category)
        return
    text = row.get(config.text_field)
    if not isinstance(text, str):
        found = "no such field" if config.text_field not in row else f"{type(text).__name__}, not text"
        raise InputError(
            f"{where}: neither data.messages_field={config.messages_field!r} nor "
            f"data.text_field={config.text_field!r} can be read ({found}); its fields are {_names(row)}"
        )
    if text.strip():
        yield Document(identity, checked_text(text, where), category=category)


def _conversation(row: Mapping, config: DataConfig) -> Any:
    """What is read as chat, None where nothing is; ShareGPT's own field too, unless another one was named."""
    found = row.get(config.messages_field)
    is_named = config.messages_field != DataConfig.messages_field
    is_text = isinstance(row.get(config.text_field), str)
    return found if found is not None or is_named or is_text else row.get(SHAREGPT_FIELD)


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: messages must be a list of at least one message, and this is {value!r:.80}")
    return [_message(item, f"{where}, message {number}") for number, item in enumerate(value, 1)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise InputError(f"{where}: a message is an object with role and content, and this is {item!r:.80}")
    role, content = item.get("role"), item.get("content")
    if "from" in item:  # the ShareGPT layout
        role, content = SHAREGPT_ROLES.get(str(item["from"])), item.get("value")
    if not isinstance(role, str) or not isinstance(content, str):
        raise InputError(f"{where}: role and content must be text, and this is {dict(item)!r:.120}")
    return {"role": role, "content": checked_text(content, where)}


def checked_text(text: str, where: str) -> str:
    """`text`; raises InputError for half of a surrogate pair, which JSON can hold and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        raise InputError(f"{where}: character {error.start + 1} is {half}, half of a pair: no text. Mend it") from error
    return text


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))  # editors begin a file by a byte-order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text ({error.reason}). Convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: no valid JSON ({error}); JSONL holds one whole object a line") from error


def _files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in suffixes)
    if not files:
        raise InputError(f"{path}: no {' or '.join(suffixes)} file below this folder")
    return files


def _names(row: Mapping) -> str:
    return ", ".join(map(repr, row)) or "none"
