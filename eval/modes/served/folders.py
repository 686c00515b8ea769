"""Drafts as the engine is given them: folders of ours are exported, those of others taken as they are, all checked."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decode.common.errors import ConfigError, InputError
from decode.common.progress import get_logger
from decode.config import model_folder
from decode.drafters.provenance import read_provenance
from decode.models.describe import ModelDescription
from distill.engines.vllm_command import speculation
from eval.config import EvalConfig
from train.check import stage as check
from train.check.config import CheckConfig, ServedDraftConfig
from train.check.folder import ServedFolder, open_folder
from train.check.subject import form_of
from train.export import stage as export
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.engines import ENGINES
from train.export.engines.base import Launch, Loads
from train.export.source import open_source

MOST = 1 << 10
"""Tokens of a draft that is drafted one after another: no end."""
NAME = re.compile(r"[\w-][\w.-]{0,99}")
"""Of a draft: a slash would lead out of the output folder."""
log = get_logger("eval")


@dataclass(frozen=True)
class ServedDraft:
    """One draft in the form that the engine loads."""

    name: str
    """As `drafts` calls it."""
    path: str
    """The folder that was given, from which our decoder drafts."""
    folder: str
    """The folder that the engine is given."""
    form: str
    """As engines tell drafts apart."""
    compared: int
    """The draft length at which accepted tokens are compared."""
    lengths: tuple[int, ...]
    """Those that are timed, that one among them."""
    options: tuple[str, ...]
    """Of the engine's command line, the length of drafts being any."""

    @property
    def method(self) -> str:
        """As vLLM calls the form, and whether it drafts in one pass: then it makes room for the longest k, and takes
        rows of another k apart at the wrong places (v1/spec_decode/llm_base_proposer.py)."""
        found = speculation(self.options)
        return f"{found.get('method')}{' in one pass' if found.get('parallel_drafting') else ''}"

    @property
    def target(self) -> str | None:
        """The folder to serve in the target's place: a tuned prediction layer is a part of the target."""
        return self.folder if self.form == "mtp" else None


def check_drafts(cfg: EvalConfig, target: ModelDescription) -> None:
    """InputError for a draft that the engine does not take or would not read as it was trained; weights of the target
    are read only as far as folders of others are compared with them."""
    for name, path in cfg.drafts.items():
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"drafts.{name} is to name files and folders here (exports/{name}, logs); use letters, digits, - and _"
            )
        if is_ours(path):
            source = open_source(_export(cfg, path, "unused"))
            how, why = export.loads(ENGINES[cfg.served.engine], source, model_impl(cfg))
            if how is None:
                raise InputError(f"drafts.{name}={path}: {ENGINES[cfg.served.engine].title} does not serve it: {why}")
        else:
            check.run(_check(cfg, path))


def prepare(cfg: EvalConfig, name: str, target: ModelDescription, place: Path) -> ServedDraft:
    """The draft `name` as the engine loads it, exported to `place` where it is ours and not there yet."""
    path = cfg.drafts[name]
    folder = place if is_ours(path) else Path(path)
    if is_ours(path) and not place.exists():
        export.run(_export(cfg, path, str(place)))
    opened = open_folder(str(folder))
    form = form_of(opened)
    how = ENGINES[cfg.served.engine].forms[form]
    assert isinstance(how, Loads), form
    told = how.layout.most(opened.fields)
    most = MOST if told is None else told
    compared = min(cfg.decode.num_draft_tokens, most)
    if compared < cfg.decode.num_draft_tokens:
        log.info("%s drafts %d tokens at most, so its counters are compared at that", name, most)
    lengths = sorted({compared, *(k for k in cfg.served.draft_lengths if k <= most)})
    options = _options(cfg, opened, how, target)
    return ServedDraft(name, path, str(folder), form, compared, tuple(lengths), options)


def is_ours(path: str) -> bool:
    """Whether it was trained here, and is to be exported."""
    return read_provenance(model_folder(path)) is not None


def model_impl(cfg: EvalConfig) -> Literal["transformers", "auto"]:
    """By whose code the engine runs the target, as served.options say."""
    options = cfg.served.options
    pairs = zip(options, options[1:], strict=False)
    is_named = "--model-impl=transformers" in options or ("--model-impl", "transformers") in pairs
    return "transformers" if is_named else "auto"


def _export(cfg: EvalConfig, path: str, output: str) -> ExportConfig:
    return ExportConfig(
        cfg.served.engine,
        output,
        draft=SavedDraftConfig(path=path),
        target=cfg.target,
        dtype=cfg.target.dtype,  # with the target's rows as it is served
        model_impl=model_impl(cfg),
    )


def _check(cfg: EvalConfig, path: str) -> CheckConfig:
    return CheckConfig(draft=ServedDraftConfig(path=path), target=cfg.target, format=cfg.served.engine, tokens=0)


def _options(cfg: EvalConfig, folder: ServedFolder, how: Loads, target: ModelDescription) -> tuple[str, ...]:
    """As the table of engines has them; the first words are the program and the target."""
    reduced = folder.fields.get("truncated_vocab_size", target.vocab_size) < target.vocab_size
    parallel = folder.fields.get("pard_token") is not None
    asked = Launch(target.path, folder.path, 1, model_impl(cfg), is_reduced=reduced, is_parallel=parallel)
    launched = how.launch(asked)
    words = shlex.split(launched)[3:]
    return tuple(words[: words.index("--model-impl")] if "--model-impl" in words else words)
