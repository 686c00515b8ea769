"""The one reader of JSON files that lie in folders: bounded, then held against a pydantic model before anything uses
it; and the writer, which writes nothing that the reader would refuse, whole or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Generic, TypeVar
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from decode.common.errors import ConfigError, InputError, RunError

T = TypeVar("T")
MOST_BYTES = 1 << 26
"""Of a file: the manifest of 100,000 shards has 40 MB."""
MOST_LEVELS = 32
"""Of nesting: ours have 6, and Python's own parser gives up at about 1,000."""
MOST_ENTRIES = 1 << 20
"""Of a list or object."""
LONGEST_TEXT = 1 << 20
"""Characters: chat templates have some 10,000."""
LARGEST = (1 << 63) - 1
"""Integer: what numpy and torch can hold."""
_SHOWN = 80
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Size = Annotated[int, Field(ge=1, le=LARGEST)]
Seed = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


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


class Content(BaseModel):
    """What a JSON file or a part of it holds: types as they are written, no NaN, keys of later versions left aside."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="ignore")


def _plain(path: str) -> str:
    """A path that can lead nowhere but into the folder of the file that names it."""
    parts = PurePosixPath(path).parts
    outside = ".." in parts or PurePosixPath(path).is_absolute() or PureWindowsPath(path).anchor or "\\" in path
    if outside or not parts or "\0" in path:
        raise ValueError("it should be a path inside this folder, neither absolute nor with ..")
    return path


PlainPath = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_plain)]


@dataclass(frozen=True)
class JsonFile(Generic[T]):
    """A kind of JSON file: the model of what it holds, and the words for one that does not."""

    kind: type[T]
    """A subclass of Content, a dataclass, or any type that pydantic can check."""
    why: str
    """What a wrong value would do, as a clause."""
    remedy: str
    """What to do, as a sentence."""

    @cached_property
    def adapter(self) -> TypeAdapter[T]:
        """pydantic's validator; built when it is first needed, since that takes milliseconds."""
        return TypeAdapter(self.kind)

    def read(self, path: Path | str) -> T:
        """The checked content; InputError names file, field, value found and expected, why it matters, what to do."""
        return self.parse(_content_of(Path(path), self.remedy), path)

    def parse(self, text: bytes, where: Path | str) -> T:
        """The same for JSON that lies in memory; `where` names it."""
        parsed(text, where, self.remedy)
        try:
            return self.adapter.validate_json(text, strict=True)
        except ValidationError as error:
            raise InputError(f"{where}: {_first_fault(error)}: {self.why}. {self.remedy}") from error
        except ConfigError as error:  # raised by a dataclass that checks itself
            raise InputError(f"{where}: {str(error).rstrip('.')}: {self.why}. {self.remedy}") from error

    def write(self, path: Path | str, content: Any) -> None:
        """Write plain containers, whole or not at all; RunError where `read` would refuse them."""
        try:
            self.parse(json.dumps(content, ensure_ascii=False).encode(), path)
        except InputError as error:
            raise RunError(f"what was to be written cannot be used: {error}") from error
        write_json(path, content)


def read_json(path: Path | str, remedy: str = "Write it again.") -> Any:
    """The content of a JSON file within the bounds above, of any shape; InputError as `JsonFile.read` raises."""
    return parsed(_content_of(Path(path), remedy), path, remedy)


def parsed(text: bytes, where: Path | str, remedy: str) -> Any:
    """JSON within the bounds above; InputError names `where`, the fault and `remedy`."""
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_int=_integer)
        _check_bounds(content)
    except RecursionError as error:
        raise InputError(f"{where}: its values are nested more than {MOST_LEVELS} levels deep. {remedy}") from error
    except _OutOfBoundsError as error:
        raise InputError(f"{where}: {error}. {remedy}") from error
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON ({error}); it was cut short or edited. {remedy}") from error
    return content


def write_json(path: Path | str, content: Any) -> None:
    """Write `content` so that `path` holds either all of it or what it held before, even after a power cut."""
    write_atomically(Path(path), (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def file_within(folder: Path, name: str, remedy: str) -> Path:
    """The file that a JSON file in `folder` names by a PlainPath; InputError where a link leads out of the folder: it
    would be left behind when the folder is copied.

    A snapshot of the hub's cache is made of links to the blobs beside it, which belong to it.
    """
    home = folder.resolve()
    home = home.parents[1] if home.parent.name == "snapshots" else home
    file = folder / name
    if not file.resolve().is_relative_to(home):
        raise InputError(
            f"{file} is a link to {file.resolve()}, outside of its folder, and would be lost when the folder is "
            f"copied. Link the whole folder instead. {remedy}"
        )
    return file


class _OutOfBoundsError(Exception):
    """Well-formed JSON that no file of ours holds."""


def _content_of(path: Path, remedy: str) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
            raise InputError(f"{path} is not a file, and JSON is read from it. {remedy}")
        if found.st_size > MOST_BYTES:
            raise InputError(f"{path} has {found.st_size} bytes, and at most {MOST_BYTES} are read as JSON. {remedy}")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}. {remedy}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _OutOfBoundsError(
            f"the key {twice!r:.{_SHOWN}} stands twice in one object, and one of its values is wrong"
        )
    return content


def _integer(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) > LARGEST:
        raise _OutOfBoundsError(f"the number {digits:.40} has more than 63 bits")
    return int(digits)


def _check_bounds(content: Any) -> None:
    """Level by level, since a recursive check would meet the limit that it is to keep others from."""
    level = [content]
    for _ in range(MOST_LEVELS):
        inner = [one for one in level if isinstance(one, dict | list)]
        for one in inner:
            if len(one) > MOST_ENTRIES:
                raise _OutOfBoundsError(f"a list or object of it has {len(one)} entries, more than {MOST_ENTRIES}")
        level = [part for one in inner for part in _parts(one)]
        for part in level:
            if isinstance(part, str):
                _check_text(part)
        if not level:
            return
    raise RecursionError


def _parts(one: dict | list) -> Iterable[Any]:
    return (*one.keys(), *one.values()) if isinstance(one, dict) else one


def _check_text(text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise _OutOfBoundsError(f"the text {text[:40]!r}... has {len(text)} characters, more than {LONGEST_TEXT}")
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        raise _OutOfBoundsError(f"the text {text!r:.{_SHOWN}} holds half of a surrogate pair")


def _first_fault(error: ValidationError) -> str:
    """Field, what was found there, and what should be."""
    fault = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
    if fault["type"] == "missing":
        return f"{field} is missing"
    wanted = fault["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    if isinstance(fault["input"], dict) and fault["type"] == "value_error":  # several fields that do not fit together
        return f"{field}: {wanted}" if field else wanted
    return f"{field or 'its content'} is {shown(fault['input'])}, and {wanted}"


def shown(value: Any) -> str:
    """A value found in a file, cut to what a message has room for."""
    text = repr(value) if not isinstance(value, float) or math.isfinite(value) else str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
