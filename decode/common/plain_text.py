"""Text on the command line, taken as it stands: what Hydra's grammar reads as something else than text, or cannot read
at all, is quoted for it wherever a setting is text. Hydra's own quotes, null and, in sweeps, its commas and functions
keep their meaning, and so does an interpolation of something that there is."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, Transformer, ValueType
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError
from omegaconf.grammar_parser import parse as parse_interpolation

from decode.common.typed_config import arms, field_kind

_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ITEM = re.compile(rf"\s*((?:{_QUOTED})(?=\s*(?:,|\Z))|[^,]*?)\s*(?:,|\Z)", re.DOTALL)
_PAIR = re.compile(rf"({_QUOTED}|[^:]*?)\s*:\s*(.*)", re.DOTALL)


def as_argument(key: str, text: str) -> str:
    """The override that sets `key` to this text, not yet quoted for a shell."""
    return f"{key}={written(text)}"


def readable(line: str, config_class: type, groups: object, sweeps: bool) -> str:
    """The override `line` as Hydra reads it right; unchanged where its setting is no text."""
    key, equals, value = line.partition("=")
    if not equals or key.startswith("~"):
        return line
    name = key.lstrip("+")
    kind = Any if name in groups else field_kind(config_class, name) or Any  # type: ignore[operator]
    return f"{key}={_value(value, kind, sweeps)}"


def without_lost_interpolations(override: Override, config_class: type) -> str:
    """The line of an override, with `${` of its texts escaped where that begins no interpolation of anything known."""
    kind, line = field_kind(config_class, override.key_or_group), override.input_line or ""
    if kind is None or "${" not in line or not _may_be_text(_leaf(kind)):
        return line
    value = _each_text(override._value, lambda text: text if _leads_somewhere(text, config_class) else _escaped(text))
    return f"{override.get_key_element()}={replace(override, _value=value).get_value_element_as_str()}"


def written(value: Any) -> str:
    """A value as an override has it, such as one of those that Hydra found in a sweep."""
    if not isinstance(value, str):
        return Transformer.str(value)
    return _quoted(value) if value.lstrip()[:1] in ("'", '"') else _element(value, str)


def unquoted(value: str) -> str:
    """What stands in Hydra's quotes, for a reader; any other value as it is."""
    read = parsed(f"x={value}")
    return read._value.text if read is not None and isinstance(read._value, QuotedString) else value


def parsed(line: str) -> Override | None:
    """Hydra's reading of a line; None where it has none."""
    try:
        return OverridesParser.create().parse_override(line)
    except HydraException:
        return None


def _value(value: str, kind: Any, sweeps: bool) -> str:
    read = parsed(f"x={value}")
    is_sweep = read is not None and read.is_sweep_override()
    if sweeps and is_sweep and read.value_type is not ValueType.SIMPLE_CHOICE_SWEEP:  # type: ignore[union-attr]
        return value
    if _may_be_text(kind):
        items = _items(value) if sweeps and (is_sweep or read is None) else []
        several = len(items) > 1 and all(items)
        return ",".join(_element(item, kind) for item in items) if several else _element(value, kind)
    holds_text = get_origin(_some(kind)) in (list, tuple, dict) and _may_be_text(_leaf(kind))
    if not holds_text or (sweeps and (is_sweep or re.search(r"[]}]\s*,\s*[[{]", value))):
        return value
    return _container(value, kind, read)


def _container(value: str, kind: Any, read: Override | None) -> str:
    """A list or table of texts, with those quoted that Hydra reads as something else."""
    leaf, is_table = _leaf(kind), get_origin(_some(kind)) is dict
    inside = re.fullmatch(r"\s*\{(.*)\}\s*" if is_table else r"\s*\[(.*)\]\s*", value, re.DOTALL)
    content = None if read is None else read._value
    found = list(content.values()) if isinstance(content, dict) else content if isinstance(content, list) else [None]
    kinds = (str, QuotedString) if _is_text(leaf) else (str, QuotedString, int, float)
    if inside is None or not inside[1].strip() or all(isinstance(one, kinds) for one in found):
        return value
    items = _items(inside[1])
    if not is_table:
        return f"[{','.join(_element(item, leaf) for item in items)}]"
    pairs = [_PAIR.fullmatch(item) for item in items]
    if not all(pairs):
        return value
    return f"{{{','.join(f'{pair[1]}:{_element(pair[2], leaf)}' for pair in pairs if pair)}}}"


def _items(text: str) -> list[str]:
    """What lies between commas, of which those within quotes are none."""
    return [found[1] for found in _ITEM.finditer(text)][: None if text.endswith(",") or not text else -1] or [text]


def _element(text: str, kind: Any) -> str:
    """One value, quoted unless Hydra reads it as it is meant."""
    read = parsed(f"x={text}")
    value = QuotedString("", Quote.single) if read is None else read._value
    if not _is_text(kind):
        return text if read is not None and not read.is_sweep_override() else _quoted(text)
    stands = value == text and not text.endswith("\\")  # else it would escape the comma or bracket behind it
    is_meant = isinstance(value, QuotedString) or stands or (value is None and type(None) in arms(kind))
    return text if read is not None and is_meant else _quoted(text)


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def _is_text(kind: Any) -> bool:
    """Whether all values of the kind are texts."""
    wanted = [arm for arm in arms(kind) if arm is not type(None)]
    return all(
        arm is str or (get_origin(arm) is Literal and all(isinstance(one, str) for one in get_args(arm)))
        for arm in wanted
    )


def _may_be_text(kind: Any) -> bool:
    return _is_text(kind) or bool({str, Any} & set(arms(kind)))


def _some(kind: Any) -> Any:
    """The kind itself, where it may also be null."""
    return next((arm for arm in arms(kind) if arm is not type(None)), kind)


def _leaf(kind: Any) -> Any:
    """The kind of what a list or table holds; of anything else the kind itself."""
    some = _some(kind)
    if get_origin(some) is dict:
        return get_args(some)[1]
    return get_args(some)[0] if get_origin(some) in (list, tuple) else kind


def _leads_somewhere(text: str, config_class: type) -> bool:
    """Whether each `${...}` asks a resolver that there is, or names a setting with a value of its own."""
    setup_globals()  # Hydra's resolvers
    try:
        parse_interpolation(text)
    except GrammarParseError:
        return False
    asked = re.findall(r"\$\{\s*([^\s:}$]*)\s*(:?)", text)
    return all(
        OmegaConf.has_resolver(name) if colon else name.startswith(".") or field_kind(config_class, name) is not None
        for name, colon in asked
    )


def _escaped(text: str) -> str:
    """A text that OmegaConf resolves to `text`."""
    return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text)


def _each_text(value: Any, change: Any) -> Any:
    if isinstance(value, list):
        return [_each_text(one, change) for one in value]
    if isinstance(value, dict):
        return {key: _each_text(one, change) for key, one in value.items()}
    text = value.text if isinstance(value, QuotedString) else value
    return QuotedString(change(text), Quote.single) if isinstance(text, str) and "${" in text else value
