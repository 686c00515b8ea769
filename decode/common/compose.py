"""Composing a stage's configuration with Hydra, with Hydra's errors turned into messages that fit our rules."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import cast

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from decode.common.errors import ConfigError
from decode.common.plain_text import readable, without_lost_interpolations
from decode.common.typed_config import arms, field_kind, not_among, require, unknown_key_message

CONF = Path(__file__).resolve().parents[2] / "conf"
_SWEEP_FLAGS = ("-m", "--multirun", "hydra.mode=MULTIRUN")
# We own logging and run folders, and a folder named by ${now:} would differ from rank to rank.
_HYDRA_SETTINGS = ("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.run.dir=.", "hydra.output_subdir=null")

_NOISE = ("To append to your", "Config search path", "\tprovider=", "    full_key", "    object_type")


def wants_sweep(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for one job per combination of values."""
    return any(flag in arguments for flag in _SWEEP_FLAGS)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(options, overrides) of a command line, sweep flags left out."""
    rest = [argument for argument in arguments if argument not in _SWEEP_FLAGS]
    overrides = get_args_parser().parse_intermixed_args(rest).overrides
    options = list(rest)
    for override in overrides:
        options.remove(override)
    return options, overrides


def parse_overrides(stage: str, config_class: type, overrides: Sequence[str], sweeps: bool = False) -> list[Override]:
    """Hydra's parse of the overrides, where no `+` is needed for a field that the YAML leaves out, and text is taken as
    it stands."""
    known = groups(stage)
    lines = [readable(text, config_class, known, sweeps) for text in overrides]
    return [_parse(_normal(_parse(text), text, known, config_class)) for text in lines]


def compose(stage: str, config_class: type, arguments: Sequence[str]) -> dict | None:
    """The composed, resolved configuration as plain containers; None where Hydra only showed it (`--cfg job`).

    Raises ConfigError for whatever Hydra or OmegaConf refuse, and for a mandatory value that is not given.
    """
    options, overrides = split_arguments(arguments)
    parsed = parse_overrides(stage, config_class, overrides)
    lines = [without_lost_interpolations(override, config_class) for override in parsed]
    with clear_errors(stage, config_class):
        composed = _hydra_main(stage, options, lines) if options else _compose_once(stage, lines)
        if composed is None:
            return None
        return cast(dict, OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))


def _compose_once(stage: str, overrides: list[str]) -> DictConfig:
    with hydra.initialize_config_dir(str(CONF), job_name=stage, version_base="1.3"):
        return hydra.compose(stage, overrides)


def _hydra_main(stage: str, options: list[str], overrides: list[str]) -> DictConfig | None:
    """What Hydra's own options (`--cfg job`, `--hydra-help`) ask for; it composes twice, so only for them."""
    composed: list[DictConfig] = []
    main = hydra.main(config_path=str(CONF), config_name=stage, version_base="1.3")(composed.append)
    with _command_line([sys.argv[0], *options, f"hydra.job.name={stage}", *_HYDRA_SETTINGS, *overrides]):
        main()
    return composed[0] if composed else None


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        hint = "Write key=value, and quote a value that holds commas, equals signs, brackets or quotes: key='\"a,b\"'."
        raise ConfigError(f"cannot read {text!r}: {error}. {hint}") from error


def groups(stage: str) -> dict[str, str | None]:
    """Group -> its choice by default, in the order of the stage's defaults list."""
    path = CONF / f"{stage}.yaml"
    require(path.exists(), f"{path} is missing, so nothing has a value. Install draftsmith again: pip install .")
    primary = yaml.safe_load(path.read_text(encoding="utf-8"))
    entries = [entry for entry in primary.get("defaults", []) if isinstance(entry, dict)]
    return {key: choice for entry in entries for key, choice in entry.items()}


def _normal(override: Override, text: str, known: Mapping[str, str | None], config_class: type) -> str:
    if override.type not in (OverrideType.CHANGE, OverrideType.ADD):
        return text
    bare = text.removeprefix("+")
    if override.key_or_group in known:
        return bare
    kind = field_kind(config_class, override.key_or_group)
    parts, value = [arm for arm in arms(kind) if is_dataclass(arm)], override.value()
    require(
        not parts or not isinstance(value, str) or "${" in value,
        f"{bare}: {override.key_or_group} has keys of its own, and no value. Set one of them: "
        + ", ".join(f"{override.key_or_group}.{field.name}" for part in parts for field in fields(part)),
    )
    return f"++{bare}" if kind is not None else text


@contextmanager
def _command_line(argv: list[str]) -> Iterator[None]:
    """What hydra.main reads: sys.argv, and HYDRA_FULL_ERROR, which makes it raise instead of printing and exiting."""
    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = before
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error


@contextmanager
def clear_errors(stage: str, config_class: type) -> Iterator[None]:
    """Turn what Hydra, OmegaConf and YAML raise into ConfigError with a message of our own."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(_message(error, stage, config_class)) from error


def _message(error: Exception, stage: str, config_class: type) -> str:
    text = str(error)
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown and field_kind(config_class, unknown[1]) is None:
        return unknown_key_message(config_class, unknown[1], groups=groups(stage))
    missing = re.fullmatch(r"Missing mandatory value: (\S+)[\s\S]*", text)
    if missing:
        return f"{missing[1]} is not set, and nothing stands in for it. Add {missing[1]}=VALUE (see --help)"
    option = re.search(r"Could not find '([^']+)/([^'/]+)'\s+Available options in '[^']+':((?:\n\t\S+)+)", text)
    if option:
        return not_among(option[1], option[2], option[3].split())
    cause = f"\n{error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    return "\n".join(line for line in (text + cause).splitlines() if line.strip() and not line.startswith(_NOISE))
