"""`python -m train.export`: from a trained draft to folders that engines load, each of which appears whole or not at
all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from decode.common.checked_json import read_json, write_json
from decode.common.errors import InputError, RunError
from decode.common.progress import get_logger
from decode.common.run_folder import sha256_file
from decode.common.version import __version__
from decode.formats.base import Layout
from decode.formats.lm import SLIDING
from decode.formats.source import Source
from train.check.folder import FILE
from train.check.stage import check_written
from train.export.config import ExportConfig
from train.export.engine_card import engine_card, tried
from train.export.engines import ENGINES
from train.export.engines.base import Engine, Launch, Loads
from train.export.source import open_source

CARD_FOLDER = Path("THIS_FOLDER")
"""As cards name it: folders are moved and published."""
log = get_logger("export")


def run(cfg: ExportConfig) -> None:
    """Write what `cfg` says; raises InputError before any weight is read where it cannot be done."""
    output = Path(os.path.abspath(cfg.output_dir))  # noqa: PTH100 - resolve() would follow a link that is in the way
    if output.exists() or output.is_symlink():
        raise InputError(
            f"output_dir={cfg.output_dir} exists, and an export never writes over anything; delete it, or name another "
            "folder"
        )
    source = open_source(cfg)
    if source.kind != source.form:
        log.info("%s: a %s", source.folder, source.kind)
    served = by_layout(cfg, source)
    with whole_folder(output) as draft:
        for layout, engines in served.items():
            inside = Path(layout.name) if cfg.format == "all" else Path()
            write_one(source, layout, engines, draft / inside, cfg.model_impl)
            check_written(source, draft / inside, tuple(engines))
    for layout, engines in served.items():
        place = output / layout.name if cfg.format == "all" else output
        for engine in engines:
            launched = command(source, engine, place, cfg.model_impl)
            log.info("%s, for %s (%s):\n%s", place, engine.title, tried(source, engine), launched)


def by_layout(cfg: ExportConfig, source: Source) -> dict[Layout, list[Engine]]:
    """The layouts to write, each with the engines that load it; InputError where an engine that was asked for does not
    load this draft, or none does."""
    asked = list(ENGINES.values()) if cfg.format == "all" else [ENGINES[cfg.format]]
    served: dict[Layout, list[Engine]] = {}
    reasons = {}
    for engine in asked:
        how, why = loads(engine, source, cfg.model_impl)
        if how is None:
            reasons[engine.name] = why
        else:
            served.setdefault(how.layout, []).append(engine)
    if not served:
        what = "no engine loads" if cfg.format == "all" else f"format={cfg.format} cannot be written of"
        lines = "\n".join(f"- {why}" for why in dict.fromkeys(reasons.values()))
        raise InputError(
            f"{what} {source.folder} ({source.form}):\n{lines}\nPairs of format and draft that exist: {pairs()}"
        )
    for name, why in reasons.items():
        log.info("not for %s: %s", name, why)
    return served


def loads(engine: Engine, source: Source, model_impl: str) -> tuple[Loads | None, str]:
    """How the engine loads this draft, or None and the reason."""
    how = engine.forms[source.form]
    if isinstance(how, str):
        return None, how
    why = (
        _refuses_gguf(source, how)
        or _refuses_few(source)
        or _refuses_window(source, engine)
        or how.refuses(source, model_impl)
    )
    return (how, "") if why is None else (None, why)


def _refuses_gguf(source: Source, how: Loads) -> str | None:
    """Why the target's file would not do; None where the target is a folder, or the engine takes the file."""
    if how.takes_gguf or not source.is_for_gguf:
        return None
    return (
        f"{source.target.path} is a GGUF file, and a target in transformers format is wanted there. Write it as one, "
        f"python scripts/unpack_gguf.py {source.target.path} FOLDER, and give target.path=FOLDER"
    )


def _refuses_few(source: Source) -> str | None:
    """Rows that were never trained to be drafted would be."""
    if source.few_tokens is None:
        return None
    return (
        f"{source.folder} drafts {source.few_tokens} of its tokens (draft_vocab in config.json), which engines do not "
        "heed: they would draft the others too. Serve it with draftsmith itself, or train without draft.head.vocab"
    )


def _refuses_window(source: Source, engine: Engine) -> str | None:
    """No engine has sinks at the first positions of a text; without them a window is `as_sliding`."""
    window, how = source.window, engine.forms[source.form]
    if window is None:
        return None
    who = f"{source.folder} attends to its first {window.sinks} and last {window.size} positions"
    if window.sinks:
        return (
            f"{who}, and {engine.title} has no sinks before its windows: less would be accepted. Serve it with "
            "draftsmith itself, or train with draft.sinks=0 for format=transformers"
        )
    if not (isinstance(how, Loads) and how.slides):
        return (
            f"{who}, and {engine.title} was not tried with drafts that have a window. Use format=transformers, serve "
            "it with draftsmith itself, or train without draft.window"
        )
    return _no_mistral(read_json(source.folder / "config.json"), who)


def _no_mistral(fields: Mapping[str, Any], who: str) -> str | None:
    biased = [name for name in ("attention_bias", "mlp_bias") if fields.get(name)]
    if fields["model_type"] in SLIDING and not biased:
        return None
    what = f"a {fields['model_type']} model{f' with {biased[0]}' if biased else ''}"
    return (
        f"{who}, and is {what}, of which no form with a sliding_window is written. Start from a Llama or Mistral "
        "(draft.init_from), or serve it with draftsmith itself"
    )


def pairs() -> str:
    """Every engine with the forms of draft that it loads."""
    each = {name: [form for form, how in one.forms.items() if isinstance(how, Loads)] for name, one in ENGINES.items()}
    return "; ".join(f"{name}: {', '.join(forms)}" for name, forms in each.items() if forms)


def write_one(source: Source, layout: Layout, engines: list[Engine], draft: Path, model_impl: str) -> None:
    """One layout with its card, into `draft`."""
    draft.mkdir(parents=True, exist_ok=True)
    layout.write(source, draft)
    commands = {engine: command(source, engine, CARD_FOLDER, model_impl) for engine in engines}
    (draft / "README.md").write_text(engine_card(source, commands, layout.note(source)), encoding="utf-8")
    sums = {path.name: sha256_file(path) for path in sorted(draft.iterdir())}
    content = {
        "schema": 1,
        "draftsmith": __version__,
        "layout": layout.name,
        "form": source.form,
        "engines": [engine.title for engine in engines],
        "num_draft_tokens": source.num_draft_tokens,
        "own_head": source.has_own_head,
        "target": source.written["target"],
        "sha256": sums,
    }
    write_json(draft / FILE, content)


def command(source: Source, engine: Engine, folder: Path, model_impl: str) -> str:
    """How the engine is told to draft with what is in `folder`."""
    how, _ = loads(engine, source, model_impl)
    assert how is not None
    k = source.num_draft_tokens
    return how.launch(
        Launch(
            source.target.path,
            folder,
            k,
            model_impl,
            source.taps,
            source.is_calibrated,
            source.is_reduced,
            source.is_parallel,
        )
    )


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to write into, which gets its name at the end. It is nobody else's: two exports into one folder
    do not mix, and the second to end fails. A killed export leaves it."""
    draft = folder.with_name(f".{folder.name}.{uuid4().hex}.tmp")
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"output_dir={folder} cannot be made ({error.strerror}); name a folder where you may write"
        ) from error
    try:
        yield draft
        try:
            draft.rename(folder)
        except OSError as error:
            raise RunError(
                f"output_dir={folder} appeared while the export ran ({error.strerror}), and nothing is written over"
            ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
