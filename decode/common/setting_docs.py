"""What can be set, read from the dataclasses themselves: key, kind, default, and the docstring beneath each field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import typing
from typing import Any, Literal, NamedTuple, get_args, get_origin

from decode.common.typed_config import arms


class Setting(NamedTuple):
    """One setting, or a section of several, which has neither kind nor default; texts as a reader sees them."""

    key: str
    """Dotted path from the stage's configuration, such as draft.head.depth."""
    kind: str
    """Its type in YAML's words: int, str | null, single | ddp; empty for a section."""
    default: str
    """In YAML's words: null, true, [0.9, 0.95]; "required" where there is none; empty for a section."""
    text: str
    """The docstring beneath the field, as one line, None written null; empty where there is none."""


def setting_docs(config_class: type, where: str = "") -> list[Setting]:
    """Every setting of a stage's dataclass in the order of its fields, those of a section right after the section.

    `where` is the dotted path of the dataclass, which keys begin with.
    """
    hints, texts = typing.get_type_hints(config_class), _texts(config_class)
    found = []
    for field in dataclasses.fields(config_class):
        key, text = f"{where}.{field.name}" if where else field.name, texts.get(field.name, "")
        nested = [arm for arm in arms(hints[field.name]) if dataclasses.is_dataclass(arm)]
        if nested:
            found += [Setting(key, "", "", text), *setting_docs(typing.cast(type, nested[0]), key)]
        else:
            found.append(Setting(key, _kind(hints[field.name]), _default(field), text))
    return found


def _texts(config_class: type) -> dict[str, str]:
    """Field -> the text that stands right beneath it in the source, also in that of a class it is inherited from:
    Python itself keeps none of these."""
    found: dict[str, str] = {}
    for one in reversed(config_class.__mro__):
        found |= _own_texts(one) if dataclasses.is_dataclass(one) else {}
    return found


def _own_texts(config_class: type) -> dict[str, str]:
    (definition,) = ast.parse(inspect.getsource(config_class)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            text = " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
            found[field.target.id] = re.sub(r"\bNone\b", "null", text)
    return found


def _kind(kind: Any) -> str:
    if len(arms(kind)) > 1:
        return " | ".join(_kind(arm) for arm in arms(kind))
    if kind is type(None):
        return "null"
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_args(kind):
        inner = ("..." if arm is Ellipsis else _kind(arm) for arm in get_args(kind))
        return f"{get_origin(kind).__name__}[{', '.join(inner)}]"
    return kind.__name__


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return json.dumps(field.default_factory())
    if field.default is dataclasses.MISSING:
        return "required"
    is_plain = isinstance(field.default, str) and field.default != ""
    return field.default if is_plain else json.dumps(field.default)
