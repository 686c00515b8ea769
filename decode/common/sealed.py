"""JSON that an unfinished run keeps for itself, under a checksum of its own content: a figure that was edited or
damaged since is refused, also where it could have been measured."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from decode.common.checked_json import JsonFile, write_json
from decode.common.errors import InputError

KEPT = JsonFile(
    dict[str, Any],
    "figures that nobody measured would be reported",
    "Delete it and go on with resume=auto: what it held is measured anew.",
)
SEAL = "sha256"


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """`content` with its checksum."""
    return {**content, SEAL: _checksum(json.loads(json.dumps(content)))}


def check_seal(content: dict[str, Any], path: Path, file: JsonFile) -> None:
    """Raise InputError unless `content`, as it was read from `path`, is what `sealed` made."""
    told = content.get(SEAL)
    found = _checksum({key: value for key, value in content.items() if key != SEAL})
    if told != found:
        raise InputError(
            f"{path} says {SEAL}={told!r:.80}, and its content has {found}: it was edited or damaged, and {file.why}. "
            f"{file.remedy}"
        )


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    write_json(path, sealed(content))


def read_sealed(path: Path) -> dict[str, Any]:
    """What `write_sealed` wrote, object keys as text; InputError where it is anything else."""
    content = KEPT.read(path)
    check_seal(content, path, KEPT)
    del content[SEAL]
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
