"""`python -m STAGE --help`: what a stage does, its groups and its settings. Nothing of it is written down twice: the
words are the comments that head the files of conf/, and the docstrings of the stage's dataclass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml

from decode.common import compose
from decode.common.setting_docs import Setting, setting_docs
from decode.common.typed_config import require

HELP_FLAGS = {"-h", "--help"}
WIDTH = 118
_LISTED = ("draft", "mode")  # groups whose choices are told apart at once; those of the others by `--help GROUP`
_END = """
--help NAME     the choices of a group, and all settings of a group or section
--multirun      one job for each combination of values given as a=1,2, and a table that compares them
--cfg job       the values that a command stands for, without running it
--hydra-help    the flags of Hydra, which reads the command line
Read on: docs/reference/settings.md and docs/index.md of the source"""


def help_text(stage: str, config_class: type, names: list[str]) -> str:
    """One screen about the stage; with `names`, about these groups and sections. ConfigError where one is neither."""
    settings = setting_docs(config_class)
    parts = [_about(name, stage, settings) for name in names] or _overview(stage, settings)
    return "\n".join(parts) + "\n"


def choices(stage: str, group: str, settings: list[Setting]) -> dict[str, str]:
    """Name -> first sentence of each file of the group that the stage can read; the default first, null for none."""
    files = {path.stem: path for path in sorted((compose.CONF / group).glob("*.yaml"))}
    fitting = {name: _header(path)[0] for name, path in files.items() if _fits(path, stage, settings)}
    default = compose.groups(stage)[group] or "null"
    return {default: fitting.get(default, "None of them"), **fitting}


def _overview(stage: str, settings: list[Setting]) -> Iterator[str]:
    about, examples = _header(compose.CONF / f"{stage}.yaml")
    yield from (f"{about}.", "", *(f"  {line}" for line in examples))
    groups = {group: choices(stage, group, settings) for group in compose.groups(stage)}
    yield "\nA setting is key=value: seed=1 target.device=cpu 'key=[1,2]'. A group takes a choice; the first is set:"
    yield from _columns([(group, ", ".join(found)) for group, found in groups.items()])
    for group in _LISTED:
        if len(groups.get(group, ())) > 1:
            yield from (f"\n{group}=", *_columns(list(groups[group].items())))
    yield "\nSettings, their defaults, and sections of settings:"
    top = [one for one in settings if "." not in one.key and one.key not in groups]
    yield from _columns([(one.key if one.kind else f"{one.key}.*", one.default, _sentence(one.text)) for one in top])
    yield _END


def _about(name: str, stage: str, settings: list[Setting]) -> str:
    groups = compose.groups(stage)
    found = [one for one in settings if one.key == name or one.key.startswith(f"{name}.")]
    known = dict.fromkeys([*groups, *(one.key for one in settings if not one.kind)])
    require(
        bool(found) or name in groups,
        f"--help {name}: nothing is called so. Ask for one of {', '.join(known)}, or for a single setting",
    )
    lines = [f"{name}=", *_columns(list(choices(stage, name, settings).items())), ""] if name in groups else []
    rows = [(one.key, f"{one.text} ({one.kind} = {one.default})" if one.kind else one.text) for one in found]
    return "\n".join([*lines, *_columns(rows)])


def _header(path: Path) -> tuple[str, list[str]]:
    """The first sentence of the comment at the head of a file, and the commands that it shows."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:])
    text = " ".join(line for line in lines if not line.startswith(("  ", " @package")))
    return _sentence(" ".join(text.split())), [line.removeprefix("   ") for line in lines if line.startswith("  ")]


def _sentence(text: str) -> str:
    """The first one, without its stop."""
    return re.split(r"(?<=[^.]{2}\.) (?=[A-Z`])", text, maxsplit=1)[0].removesuffix(".")


def _fits(path: Path, stage: str, settings: list[Setting]) -> bool:
    """Whether a file of a group sets what the stage knows: stages share the folders of drafts and experiments."""
    text = path.read_text(encoding="utf-8")
    content = yaml.safe_load(text) or {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            fits = {key.removeprefix("override /") for key in entry} <= compose.groups(stage).keys()
        else:
            fits = entry == "_self_" or _fits(path.with_name(f"{entry}.yaml"), stage, settings)
        if not fits:
            return False
    where = "" if "@package _global_" in text else f"{path.parent.name}."
    return _is_known(content, where, {one.key: one.kind for one in settings})


def _is_known(content: Mapping[str, Any], where: str, kinds: Mapping[str, str]) -> bool:
    for key, value in content.items():
        path = f"{where}{key}"
        if path not in kinds:
            return False
        if not kinds[path] and isinstance(value, Mapping) and not _is_known(value, f"{path}.", kinds):
            return False
    return True


def _columns(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Rows of short words and a last text, which is wrapped under itself."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for *words, text in rows:
        start = "  " + "".join(f"{word:{width}}  " for word, width in zip(words, widths, strict=True))
        indent = " " * len(start)
        yield fill(text, WIDTH, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False).rstrip()
