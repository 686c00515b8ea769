"""`python -m train.export`: from a trained draft to folders that engines load, each of which appears whole or not at
all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from decode.common.checked_json import write_json
from decode.common.errors import InputError, RunError
from decode.common.progress import get_logger
from decode.common.run_folder import sha256_file
from decode.common.version import __version__
from decode.formats.base import Layout
from decode.formats.source import Source
from train.check.folder import FILE
from train.check.stage import check_written
from train.export.config import ExportConfig
from train.export.engine_card import engine_card, tried
from train.export.engines import ENGINES
from train.export.engines.base import Engine, Launch, Loads
from train.export.loadable import loads
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
