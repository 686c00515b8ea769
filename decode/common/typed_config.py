"""Building a stage's dataclass from plain containers, so that an unknown key or a wrong type fails from every route;
and arguments of one kind that are given as another: converted where nothing is lost, refused where they would be read
as something else (True as 1, "false" as true, 1.5 as 1)."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from decode.common.errors import ConfigError

T = TypeVar("T")


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def require_at_least(least: int, config: object, where: str, *names: str) -> None:
    """Raise ConfigError unless the fields `names` of `config` are at least `least`, or None; `where` ends in a dot."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= least, f"{where}{name}={value} must be at least {least}")


def require_some(config: object, where: str, **examples: str) -> None:
    """Raise ConfigError where a field of `config` is empty, with the example of one; `where` ends in a dot."""
    for name, example in examples.items():
        require(bool(getattr(config, name)), f"{where}{name} is empty; name at least one, e.g. {example}")


def build(cls: type[T], container: Mapping, where: str = "") -> T:
    """An instance of the dataclass `cls` from a mapping of plain values; nested dataclasses are built the same way.

    `where` is the dotted path of the mapping, for messages. Raises ConfigError for an unknown or missing key, a value
    of another type, and whatever the dataclass itself refuses in `__post_init__`.
    """
    if not isinstance(container, Mapping):
        raise ConfigError(f"{where or cls.__name__} = {container!r} is not a mapping of keys. {_choices(cls)}")
    for path in _unknown_paths(cls, container):
        raise ConfigError(unknown_key_message(cls, path, where))
    types_by_name = _field_types(cls)
    values = {key: _convert(types_by_name[key], value, _join(where, key)) for key, value in container.items()}
    missing = [name for name in _required_names(cls) if name not in values]
    require(not missing, f"missing {', '.join(_join(where, name) for name in missing)}: it has no default, so set it.")
    try:
        return cls(**values)
    except ConfigError as error:
        if not where or str(error).startswith(where):
            raise
        raise ConfigError(f"{where}: {error}") from error


def unknown_key_message(cls: type, path: str, where: str = "", groups: Iterable[str] = ()) -> str:
    """Sentences that name the unknown dotted `path` in `cls`, up to three keys that may have been meant, and the valid
    keys beside it. `groups` are names that are known besides those of `cls`."""
    holder = nested_class(cls, path) or cls
    *others, last = [repr(_join(where, one)) for one in _meant(cls, path, groups)] or [""]
    hint = f" Did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else ""
    return f"unknown key {_join(where, path)!r}.{hint} {_choices(holder)}"


def _unknown_paths(cls: type, container: Mapping, where: str = "") -> Iterator[str]:
    for key, value in container.items():
        inner = nested_class(cls, f"{key}.")
        if key not in _field_types(cls):
            yield _join(where, key)
        elif inner is not None and isinstance(value, Mapping):
            yield from _unknown_paths(inner, value, _join(where, key))


def _meant(cls: type, path: str, groups: Iterable[str]) -> list[str]:
    """Up to three of all keys: those of the same or nearly the same last name, wherever they are, and the nearest one
    beside it."""
    parent, _, last = path.rpartition(".")
    holder = nested_class(cls, path)
    every = dict.fromkeys([*_paths(cls), *groups])
    by_name: dict[str, list[str]] = {}
    for one in every:
        by_name.setdefault(one.rpartition(".")[2], []).append(one)
    own = [] if holder is None else [*_field_types(holder), *(groups if not parent else ())]
    beside = [_join(parent, name) for name in difflib.get_close_matches(last, own, n=1)]
    nearest = difflib.get_close_matches(last, by_name, n=1, cutoff=0.8)
    elsewhere = sorted(by_name[nearest[0]], key=lambda one: not one.endswith(f".{path}")) if nearest else []
    return beside if set(beside) & set(elsewhere) else [*elsewhere, *beside][:3]


def _paths(cls: type, where: str = "") -> Iterator[str]:
    """Dotted paths of all fields, also of the nested dataclasses themselves."""
    for name in _field_types(cls):
        yield _join(where, name)
        inner = nested_class(cls, f"{name}.")
        if inner is not None:
            yield from _paths(inner, _join(where, name))


def nested_class(cls: type, path: str) -> type | None:
    """The dataclass that holds the last key of the dotted `path`, or None where the path leaves the dataclasses."""
    for name in path.split(".")[:-1]:
        nested = [arm for arm in arms(_field_types(cls).get(name)) if dataclasses.is_dataclass(arm)]
        if not nested:
            return None
        cls = typing.cast(type, nested[0])
    return cls


def field_kind(cls: type, path: str) -> Any:
    """The annotation of what the dotted `path` names: a field of a (nested) dataclass, or an entry of a field that is a
    dict; None where it names neither."""
    *parents, name = path.split(".")
    holder = nested_class(cls, path)
    if holder is not None:
        return _field_types(holder).get(name)
    above = nested_class(cls, ".".join(parents))
    tables = [] if above is None else [arm for arm in arms(_field_types(above).get(parents[-1])) if _is_dict(arm)]
    return get_args(tables[0])[1] if tables else None


def _is_dict(kind: Any) -> bool:
    return get_origin(kind) is dict


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _required_names(cls: type) -> list[str]:
    nothing = dataclasses.MISSING
    fields = (field for field in dataclasses.fields(cls) if field.init)
    return [field.name for field in fields if field.default is nothing and field.default_factory is nothing]


def _choices(cls: type) -> str:
    return f"Valid keys here: {', '.join(sorted(_field_types(cls)))}."


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def arms(kind: Any) -> tuple:
    """The kinds that a union allows; of any other kind itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _convert(kind: Any, value: Any, where: str) -> Any:
    """`value` as an instance of the annotation `kind`; ConfigError names the path, the value and the type."""
    if len(arms(kind)) > 1:
        return _convert_union(kind, value, where)
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, where)
    origin = get_origin(kind)
    if origin is Literal:
        return _convert_literal(kind, value, where)
    if origin in (list, tuple):
        return _convert_sequence(kind, value, where)
    if origin is dict:
        return _convert_dict(kind, value, where)
    return _convert_scalar(kind, value, where)


def _convert_union(kind: Any, value: Any, where: str) -> Any:
    wanted = [arm for arm in arms(kind) if arm is not type(None)]
    if value is None:
        require(len(wanted) < len(arms(kind)), _mismatch(kind, value, where))
        return None
    if len(wanted) == 1:
        return _convert(wanted[0], value, where)
    for arm in wanted:
        try:
            return _convert(arm, value, where)
        except ConfigError:
            continue
    raise ConfigError(_mismatch(kind, value, where))


def _convert_literal(kind: Any, value: Any, where: str) -> Any:
    choices = get_args(kind)
    same = [choice for choice in choices if choice == value and type(choice) is type(value)]
    require(bool(same), not_among(where, value, choices))
    return same[0]


def not_among(where: str, value: Any, choices: Iterable[Any]) -> str:
    """A sentence that names what may be chosen, and what may have been meant."""
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{where} = {value!r} must be one of {', '.join(map(repr, choices))}.{hint}"


def _convert_sequence(kind: Any, value: Any, where: str) -> list | tuple:
    require(isinstance(value, list | tuple), _mismatch(kind, value, where))
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is tuple and kinds[-1] is not Ellipsis:
        require(len(value) == len(kinds), f"{where} = {value!r} must have {len(kinds)} entries, and has {len(value)}.")
    else:
        kinds = (kinds[0],) * len(value)
    pairs = enumerate(zip(kinds, value, strict=True))
    return origin(_convert(arm, item, f"{where}[{index}]") for index, (arm, item) in pairs)


def _convert_dict(kind: Any, value: Any, where: str) -> dict:
    require(isinstance(value, Mapping), _mismatch(kind, value, where))
    key_kind, value_kind = get_args(kind)
    return {
        _convert(key_kind, key, f"{where} (key)"): _convert(value_kind, item, _join(where, key))
        for key, item in value.items()
    }


def _convert_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    if kind is float:
        return _convert_float(value, where)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    is_same = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    require(is_same, _mismatch(kind, value, where))
    return value


def _convert_float(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    require(math.isfinite(number), f"{where} = {value!r} must be a finite number.")
    return number


def _mismatch(kind: Any, value: Any, where: str) -> str:
    expected = kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)
    hint = f" Quote it to keep it text: {where}='\"{value}\"'." if kind is str and value is not None else ""
    return f"{where} = {value!r} must be of type {expected}, and is of type {type(value).__name__}.{hint}"


def whole(value: Any, name: str, least: int | None = None) -> int:
    """An int, numpy's and tensors of one number included; raises ConfigError below `least` and for anything else."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    require(number is not None, f"{name}={value!r} is of type {type(value).__name__}; give a whole number")
    assert number is not None
    require(least is None or number >= least, f"{name}={number} is too small; give {least} or more")
    return number


def real(value: Any, name: str) -> float:
    """A float, numpy's and tensors of one number included; raises ConfigError for texts, truth values and the like."""
    try:
        number = None if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    require(number is not None, f"{name}={value!r} is of type {type(value).__name__}; give a number")
    assert number is not None
    return number


def flag(value: Any, name: str) -> bool:
    """True or False itself: any text that is not empty would count as true."""
    require(isinstance(value, bool), f"{name}={value!r} is of type {type(value).__name__}; give True or False")
    return value


def wholes(values: Any, name: str) -> list[int]:
    """A list of ints from one number, several, or a tensor of them; raises ConfigError."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    return [whole(one, name) for one in (values if _is_many(values) else [values])]


def texts(values: Any, name: str) -> tuple[str, ...]:
    """Texts from one or several, none of them empty, as that is found everywhere; raises ConfigError."""
    found = (values,) if isinstance(values, str) else tuple(values) if _is_many(values) else (values,)
    wrong = [one for one in found if not isinstance(one, str)]
    require(not wrong, f"{name}={values!r} holds {wrong}, which are not texts; give str")
    require("" not in found, f"{name}={values!r} holds an empty text, which is found everywhere; leave it out")
    return found


def _is_many(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, str | bytes)
