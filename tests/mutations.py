"""Ways to damage a file of JSON or safetensors, drawn from a seed: what a hand, a disk or a half-finished copy does."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

Mutant = tuple[str, bytes]
"""What was done, and the file's new content."""
_DEEP = 3000  # levels: three times what Python's parser bears


def json_mutants(content: Any, seed: str, count: int) -> Iterator[Mutant]:
    """`count` damaged versions of a JSON object, every kind in turn, each at a place drawn from `seed`."""
    rng, names = random.Random(seed), [*_OF_VALUES, *_OF_FILES]
    for name in islice(cycle(names), count):
        if name in _OF_FILES:
            yield name, _OF_FILES[name](json.dumps(content), rng)
            continue
        damaged = copy.deepcopy(content)
        holder, key, where = rng.choice(list(_places(damaged)))
        told = _OF_VALUES[name](holder, key, rng)
        text = json.dumps(damaged) if told is None else json.dumps(damaged).replace(json.dumps(_MARK), told)
        yield f"{name} at {where}", text.encode()


def header_mutants(content: bytes, seed: str, count: int) -> Iterator[Mutant]:
    """`count` versions of a safetensors file with a damaged header."""
    rng = random.Random(seed)
    for name, damage in islice(cycle(_OF_HEADERS.items()), count):
        yield name, damage(content, rng)


def _places(value: Any, where: str = "") -> Iterator[tuple[Any, Any, str]]:
    """(list or object, key in it, path) of every value inside `value`."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key, f"{where}/{key}"
        yield from _places(value[key], f"{where}/{key}")


_MARK = "the place of what json.dumps cannot write"


def _set(new: Callable[[Any], Any]) -> Callable[[Any, Any, random.Random], None]:
    def damage(holder: Any, key: Any, rng: random.Random) -> None:
        holder[key] = new(holder[key])

    return damage


def _written(text: str) -> Callable[[Any, Any, random.Random], str]:
    def damage(holder: Any, key: Any, rng: random.Random) -> str:
        holder[key] = _MARK
        return text

    return damage


def _delete(holder: Any, key: Any, rng: random.Random) -> None:
    del holder[key]


def _twice(holder: Any, key: Any, rng: random.Random) -> str | None:
    """An entry of a list again, or a key of an object with another value."""
    if isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
        return None
    before, holder[key] = holder[key], _MARK
    return f"{json.dumps(before)}, {json.dumps(key)}: null"


def _other_type(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes"
    return {str: 7, int: "7", float: "x", list: {"a": 1}, dict: [value], type(None): {}}[type(value)]


_OF_VALUES: dict[str, Callable[[Any, Any, random.Random], str | None]] = {
    "deleted": _delete,
    "null": _set(lambda _: None),
    "another type": _set(_other_type),
    "true": _set(lambda _: True),
    "negative": _set(lambda value: -1 if isinstance(value, int) else -2.5 if isinstance(value, float) else [-1]),
    "huge": _set(lambda value: 10**30 if isinstance(value, int) else 1e300),
    "a number of 5,000 digits": _written("9" * 5000),
    "empty": _set(lambda value: type(value)() if isinstance(value, str | list | dict) else ""),
    "nested deep": _written("[" * _DEEP + "]" * _DEEP),
    "nested": _set(lambda value: [[[[value]]]]),
    "a path with ..": _set(lambda value: f"../../{value}"),
    "an absolute path": _set(lambda value: f"/etc/{value}"),
    "NaN": _written("NaN"),
    "infinity": _written("1e999"),
    "half a surrogate pair": _written('"\\ud800"'),
    "twice": _twice,
    "a list in place of an object": _set(lambda value: list(value) if isinstance(value, dict) else [value]),
}


def _flipped(text: str, rng: random.Random) -> bytes:
    content = bytearray(text.encode())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


_OF_FILES: dict[str, Callable[[str, random.Random], bytes]] = {
    "cut short": lambda text, rng: text.encode()[: rng.randrange(len(text))],
    "a list": lambda text, rng: f"[{text}]".encode(),
    "null as a whole": lambda text, rng: b"null",
    "an empty object": lambda text, rng: b"{}",
    "not UTF-8": lambda text, rng: b"\xff\xfe" + text.encode(),
    "a flipped bit": _flipped,
    "a byte-order mark": lambda text, rng: b"\xef\xbb\xbf" + text.encode(),
    "another file": lambda text, rng: rng.choice([b'{"model_type": "llama"}', b'{"stage": "train"}', b'"text"', b"1"]),
}


def _header(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _with_header(change: Callable[[dict[str, Any], str, random.Random], None]) -> Callable:
    def damage(content: bytes, rng: random.Random) -> bytes:
        header, rest = _header(content)
        change(header, rng.choice(sorted(set(header) - {"__metadata__"})), rng)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + rest

    return damage


def _flip_header(content: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    at = rng.randrange(8 + length)
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def _rename(header: dict[str, Any], name: str, rng: random.Random) -> None:
    header[f"{name}x"] = header.pop(name)


def _swap(header: dict[str, Any], name: str, rng: random.Random) -> None:
    other = rng.choice(sorted(set(header) - {"__metadata__", name}))
    header[name], header[other] = header[other], header[name]


_TYPES = {"F32": "I32", "I64": "U64", "U8": "I8", "U16": "I16", "I32": "U32", "I16": "BF16", "I8": "U8", "F16": "I16"}
_OF_HEADERS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a flipped bit": _flip_header,
    "another dtype": _with_header(lambda h, name, rng: h[name].update(dtype=_TYPES.get(h[name]["dtype"], "F64"))),
    "another shape": _with_header(lambda h, name, rng: h[name].update(shape=[1, *h[name]["shape"]])),
    "offsets outside": _with_header(lambda h, name, rng: h[name].update(data_offsets=[0, 1 << 40])),
    "a missing array": _with_header(lambda h, name, rng: h.pop(name)),
    "another name": _with_header(_rename),
    "swapped arrays": _with_header(_swap),
    "a negative size": _with_header(lambda h, name, rng: h[name].update(shape=[-1])),
    "nested deep": lambda content, rng: struct.pack("<Q", 2 * _DEEP) + b"[" * _DEEP + b"]" * _DEEP,
    "a huge header": lambda content, rng: struct.pack("<Q", 1 << 60) + content[8:],
    "cut short": lambda content, rng: content[: rng.randrange(len(content))],
    "empty": lambda content, rng: b"",
}
