"""The stage: hands the configuration to what it asks for, each a module of its own with a `run`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path

from transformers.utils import logging as transformers_logging

from decode.common.extras import extra, require_installed
from decode.common.progress import get_logger
from decode.common.typed_config import build, require
from decode.config import model_folder
from decode.drafters.provenance import TextOrigin, read_provenance
from decode.models.describe import describe_model
from distill.corpora.config import DataConfig
from distill.prompts.run_chats import with_day
from distill.records.record_manifest import MANIFEST
from eval.config import EvalConfig
from eval.prompts.chats import has_chats
from eval.render.files import check_tracking

log = get_logger("eval")


def with_own_data(cfg: EvalConfig) -> EvalConfig:
    """`cfg` with a corpus in place of data=own, and a line that says which. What is set of `data` besides stays as set,
    unless it is set to what it is by default: that cannot be told from silence.

    Raises InputError where the folder that would say it is damaged.
    """
    known = dict(_trained_on(cfg))
    if cfg.data.name != "own":
        _say_others(cfg, known)
        return cfg
    usual = asdict(DataConfig(name="own"))
    given = {name: value for name, value in asdict(cfg.data).items() if value != usual[name]}
    who, data = next(iter(known.items()), ("", DataConfig()))
    if cfg.prompts.file is None:
        source = f"the corpus of {who}" if who else "since no draft's folder says what it was trained on"
        log.info("prompts: held-out documents of %s, %s (data=NAME chooses another)", _named(data), source)
    found = replace(cfg, data=replace(data, **given))
    _say_others(found, known)
    return found


def _trained_on(cfg: EvalConfig) -> Iterator[tuple[str, DataConfig]]:
    """Who says it (as on the command line), and what: the drafts in their order, for mode=families its records."""
    if cfg.mode == "families":
        manifest = Path(cfg.families.records) / "manifest.json"
        if manifest.is_file():
            yield f"families.records={cfg.families.records}", _data_of(MANIFEST.read(manifest).config.data)
    for name, path in cfg.drafts.items():
        provenance = read_provenance(model_folder(path))
        if provenance is not None and provenance.data is not None:
            yield f"drafts.{name}={path}", _data_of(provenance.data)


def _data_of(origin: TextOrigin) -> DataConfig:
    known = {one.name for one in fields(DataConfig)}
    return build(DataConfig, {name: value for name, value in origin.model_dump().items() if name in known}, "data")


def _say_others(cfg: EvalConfig, known: dict[str, DataConfig]) -> None:
    """Which drafts learned from another corpus than the prompts are of: their figures are of text that is new to
    them."""
    for who, data in known.items():
        if cfg.prompts.file is None and _named(data) != _named(cfg.data):
            log.info("prompts: held-out documents of %s, and %s was trained on %s", _named(cfg.data), who, _named(data))


def _named(data: DataConfig) -> str:
    return f"data={data.name}" + (f" data.path={data.path}" if data.path else "")


MODES = {
    "report": "eval.modes.report",
    "certificate": "eval.modes.certificate",
    "profile": "eval.modes.profile.mode",
    "decoders": "eval.modes.compare.mode",
    "families": "eval.modes.families.mode",
    "served": "eval.modes.served.mode",
    "drafters": "eval.modes.compare.mode",
    "exits": "eval.modes.exits.mode",
}
"""EvalConfig.mode -> module; imported when it is wanted."""


def run(cfg: EvalConfig) -> None:
    """Measure what cfg.mode names and write it to cfg.output_dir.

    Raises ConfigError and InputError before any weight is loaded, and RunError where a measurement fails its claim.
    """
    transformers_logging.set_verbosity_error()  # its advice on generate() is about calls that it makes itself
    transformers_logging.disable_progress_bar()
    processes = os.environ.get("WORLD_SIZE", "1")
    require(
        processes == "1",
        f"the launcher started {processes} processes, and a report is measured by one: they would take each other's "
        "time. Start `python -m eval` alone",
    )
    check_tracking(cfg)
    for package in ("matplotlib", "markupsafe"):
        require_installed(package, "a report", f"Install it, {extra('eval')}")
    import_module(MODES[cfg.mode]).run(_with_day(with_own_data(cfg)))


def _with_day(cfg: EvalConfig) -> EvalConfig:
    """With the day that chats are of, where the prompts may be chats and no draft's corpus names one."""
    if not has_chats(cfg):
        return cfg
    tokenizer = describe_model(cfg.target).tokenizer
    return replace(cfg, data=with_day(cfg.data, tokenizer, cfg.output_dir, has_chats=True))
