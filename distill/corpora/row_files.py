"""Rows of JSONL, JSON and parquet files, and what makes a row of any source a document."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from decode.common.errors import InputError
from distill.corpora.bad_rows import BadRow
from distill.corpora.config import DataConfig
from distill.corpora.corpus import Document, or_bad
from distill.corpora.messages import checked_text, from_first_question, names_of, read_conversation
from distill.corpora.text_files import NOT_UTF8

CONVERSATION_FIELDS = ("conversations", "conversation", "dialogue", "dialog")
"""Where chats stand that are not called messages; the first is ShareGPT's."""
JSON_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_BETWEEN = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()


def jsonl_rows(path: Path, config: DataConfig) -> Iterator[Document | BadRow]:
    """One JSON object a line, or a file that is one JSON array of them; gzipped too. Raises InputError where an array
    is broken, since what stands behind the place cannot be read."""
    for file in _files(path, JSON_SUFFIXES):
        try:
            with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
                begin = stream.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()
                stream.seek(0)
                yield from _array(stream, file, config) if begin.startswith(b"[") else _lines(stream, file, config)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{file}: damaged ({error}). Write or copy it again") from error


def parquet_rows(path: Path, config: DataConfig) -> Iterator[Document | BadRow]:
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
                yield from table_row(row, f"{file}, row {number}", f"{file.name}:{number}", config)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{file}, after row {number}: damaged ({error}). Write or copy it again") from error


def table_row(row: Mapping, where: str, default_id: str, config: DataConfig) -> Iterator[Document | BadRow]:
    """The document of a table's row. Its objects hold every field that any row has; those that are null are not its
    own, and a template would write them."""
    return or_bad(
        _row_document({name: _without_nulls(value) for name, value in row.items()}, where, default_id, config)
    )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _lines(stream: BufferedIOBase, file: Path, config: DataConfig) -> Iterator[Document | BadRow]:
    for number, line in enumerate(map(bytes.strip, stream), 1):
        if line:
            yield from or_bad(_line_document(line, f"{file}, line {number}", f"{file.name}:{number}", config))


def _line_document(line: bytes, where: str, default_id: str, config: DataConfig) -> Iterator[Document]:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # editors begin a file by a byte-order mark
    except UnicodeDecodeError as error:
        raise BadRow(where, NOT_UTF8, f" ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise BadRow(where, "no valid JSON; JSONL holds one whole object a line", f" ({error})") from error
    yield from _row_document(row, where, default_id, config)


def _array(stream: BufferedIOBase, file: Path, config: DataConfig) -> Iterator[Document | BadRow]:
    """The rows of a file that is one array, or lines after all where the first one is a whole value of its own."""
    first, rest = stream.readline(), stream.read()
    stream.seek(0)
    if rest.strip() and _is_json(first):
        yield from _lines(stream, file, config)
        return
    try:
        text = (first + rest).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: {NOT_UTF8} ({error.reason})") from error
    number, place = 0, text.index("[") + 1
    while not text.startswith("]", place := _BETWEEN.match(text, place).end()):  # type: ignore[union-attr]
        number += 1
        try:
            row, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise _broken(file, number, str(error)) from error
        yield from or_bad(_row_document(row, f"{file}, row {number}", f"{file.name}:{number}", config))
    if text[place + 1 :].strip():
        raise _broken(file, number + 1, "more text behind the end of the array")


def _broken(file: Path, number: int, error: str) -> InputError:
    return InputError(
        f"{file}, row {number}: no valid JSON ({error}), and what follows in the array cannot be read. Write or copy "
        "the file again"
    )


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _row_document(row: Any, where: str, default_id: str, config: DataConfig) -> Iterator[Document]:
    """The document of a row, or nothing where it is blank; BadRow names `where`, file and line of a bad row."""
    if not isinstance(row, Mapping):
        raise BadRow(where, "a JSON object is wanted", f", and this is {type(row).__name__}")
    if config.id_field is not None and row.get(config.id_field) is None:
        raise BadRow(where, f"no field data.id_field={config.id_field!r}", f"; its fields are {names_of(row)}")
    identity = default_id if config.id_field is None else checked_text(str(row[config.id_field]), where)
    category = row.get("category")
    category = None if category is None else checked_text(str(category), where)
    field = _conversation_field(row, config)
    if field is not None:
        messages, is_cut = from_first_question(read_conversation(row, field, where), where)
        yield Document(identity, messages=messages, category=category, where=where, is_cut=is_cut)
        return
    text = row.get(config.text_field)
    if not isinstance(text, str):
        found = "no such field" if config.text_field not in row else f"{type(text).__name__}, not text"
        raise BadRow(
            where,
            f"neither data.messages_field={config.messages_field!r} nor data.text_field={config.text_field!r} can be "
            "read",
            f" ({found}); its fields are {names_of(row)}",
        )
    if text.strip():
        yield Document(identity, checked_text(text, where), category=category, where=where)


def _conversation_field(row: Mapping, config: DataConfig) -> str | None:
    """What is read as chat, None where nothing is; what others call it too, unless a field was named or there is
    text."""
    if row.get(config.messages_field) is not None:
        return config.messages_field
    if config.messages_field != DataConfig.messages_field or isinstance(row.get(config.text_field), str):
        return None
    return next((field for field in CONVERSATION_FIELDS if row.get(field) is not None), None)


def _files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.name.endswith(suffixes))
    if not files:
        plain = " or ".join(suffix for suffix in suffixes if not suffix.endswith(".gz"))
        raise InputError(f"{path}: no {plain} file below this folder")
    return files
