"""results.json: written and read by the same classes, so that no figure is lost, renamed or typed by hand between."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from decode.common.checked_json import read_json, write_json
from decode.common.errors import InputError
from eval.config import Mode
from eval.results.row import Part, Row

SCHEMA = 2
_EDITED = "it was edited or cut, and what it says was not measured. Write the report again"


class ResultsFile(Part):
    """What every mode's results.json holds; a mode adds keys of its own."""

    model_config = ConfigDict(extra="allow")

    schema_version: Literal[2] = Field(alias="schema")
    mode: Mode
    name: str
    environment: dict[str, Any]
    """Machine, versions, revision, command, seed and seconds."""
    target: dict[str, Any]
    definitions: dict[str, str]
    """What each figure means, in words."""
    rows: list[Row]


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write them whole or not at all, in the layout that `read_results` reads."""
    ResultsFile.model_validate(results)
    write_json(path, results)


def read_results(path: Path) -> dict[str, Any]:
    """The content of results.json; InputError names what is not as this version writes it."""
    content = read_json(path)
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise InputError(
            f"{path} has schema {schema!r}, and this version reads schema {SCHEMA}; write the report again"
        )
    try:
        rows = ResultsFile.model_validate(content).rows
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {where}: {first['msg']}, found {str(first['input'])[:80]!r}: {_EDITED}") from error
    for number, row in enumerate(rows):
        missing = sorted(Row.model_fields.keys() - row.model_fields_set)
        if missing:
            raise InputError(f"{path}: row {number} lacks {', '.join(missing)}: {_EDITED}")
    return content
