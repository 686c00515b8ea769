"""Plain text files: the standard library of the running interpreter, or any text file or folder of them."""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from decode.common.errors import InputError
from distill.corpora.bad_rows import BadRow
from distill.corpora.corpus import Document, or_bad, unit_hash

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
NOT_UTF8 = "not UTF-8 text. Convert the file to UTF-8"
TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".text"}


def python_stdlib() -> Iterator[Document]:
    """Every source file of the interpreter's library but its tests; the id is the path inside the library."""
    root, files = stdlib_files()
    for file in _shuffled(files, root):
        with tokenize.open(file) as stream:  # honours the encoding line of a source file
            yield from _document(stream.read(), file, root, "code")


def stdlib_files() -> tuple[Path, list[Path]]:
    """The folder of the interpreter's library, and its source files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return root, [file for file in root.rglob("*.py") if not LEFT_OUT & set(file.relative_to(root).parts[:-1])]


def text_files(path: Path) -> Iterator[Document | BadRow]:
    """The text file at `path`, or every text file below that folder; the id is the path inside it."""
    if path.is_file():
        yield from or_bad(_utf8_document(path, path.parent))
        return
    files = [file for file in path.rglob("*") if file.is_file() and file.suffix in TEXT_SUFFIXES]
    if not files:
        raise InputError(f"{path}: no text file below this folder ({', '.join(sorted(TEXT_SUFFIXES))})")
    for file in _shuffled(files, path):
        yield from or_bad(_utf8_document(file, path))


def _utf8_document(file: Path, root: Path) -> Iterator[Document]:
    """That of `file`; raises BadRow naming file and line where it is not UTF-8."""
    content = file.read_bytes()
    try:
        yield from _document(content.decode("utf-8"), file, root, None)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadRow(f"{file}, line {line}", NOT_UTF8, f" ({error.reason})") from error


def _shuffled(files: list[Path], root: Path) -> list[Path]:
    # By hash instead of by name, so that the first documents are a fair sample and not those that start with "a".
    return sorted(files, key=lambda file: unit_hash("order", file.relative_to(root).as_posix()))


def _document(text: str, file: Path, root: Path, category: str | None) -> Iterator[Document]:
    if text.strip():
        yield Document(file.relative_to(root).as_posix(), text, category=category, where=str(file))
