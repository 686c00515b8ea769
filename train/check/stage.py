"""`python -m train.check`: one line for each check that passes, one for each fault, exit code 2 where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from transformers.utils import logging as hf_logging

from decode.common.errors import InputError, UserError
from decode.common.progress import get_logger
from decode.formats.form import refuse_single_numbers
from decode.formats.head import READERS, in_words, read_published
from decode.formats.rope import plain_rope
from decode.formats.source import Source
from decode.models.describe import describe_model
from train.check.agreement import measure
from train.check.checks import applicable, findings
from train.check.config import CheckConfig
from train.check.folder import FILE, ServedFolder, open_folder
from train.check.replicas import REPLICAS
from train.check.served import same_files, same_logits, same_states
from train.check.subject import Finding, Subject, form_of
from train.drafts.rope import rope_of
from train.export.engines import ENGINES
from train.export.engines.base import Engine, Loads

log = get_logger("check")


def run(cfg: CheckConfig) -> None:
    """Check what `cfg` names; raises InputError with every fault that was found."""
    hf_logging.disable_progress_bar()
    folder = open_folder(cast(str, cfg.draft.path))
    if folder.edited:
        log.info(
            "edited since python -m train.export wrote it (%s): %s. What was changed may show in none of the checks",
            FILE,
            ", ".join(folder.edited),
        )
    form = form_of(folder)
    if form in READERS:
        refuse_single_numbers(folder)
    engines = engines_of(cfg.format, folder, form)
    subject = Subject(folder, describe_model(cfg.target, loads=bool(cfg.tokens)), form, engines)
    _describe(subject)
    found = findings(subject)
    if cfg.tokens and not found:
        found = list(measure(subject, cfg))
    report(subject, found)


def _describe(subject: Subject) -> None:
    """Tell what `decode.load_drafter` makes of a head, or why it takes none; engines may all the same."""
    if subject.form not in READERS:
        return
    try:
        log.info("%s", in_words(read_published(subject.folder.path, subject.target)))
    except UserError as error:
        log.info("draftsmith itself does not draft with it: %s", error)


def check_written(source: Source, folder: Path, engines: tuple[Engine, ...]) -> None:
    """Check what `train.export` has written, read back, before it gets its name: as `run` does, and that its logits are
    those of the head. InputError where they are not, which is a fault of ours or a damaged head."""
    opened = open_folder(str(folder))
    is_head = source.form in REPLICAS
    subject = Subject(opened, source.target, form_of(opened), engines, source.head.ends if is_head else None)
    assert subject.form == source.form, (subject.form, source.form)
    found = against(subject, source)
    if found:
        raise InputError(
            f"nothing was written, since engines would not draft with it as {source.folder} does:\n{_lines(found)}\n"
            "Either the head is damaged, or this is a fault of the export: please report it"
        )
    same = "its logits are the head's own" if is_head else "its files are the draft's own"
    log.info("%d checks hold of what was written, read back, and %s", len(applicable(subject)), same)


def against(subject: Subject, source: Source) -> list[Finding]:
    """All faults of a folder that was written of `source`; types of targets were refused before, where it is known by
    what the engine runs them, and a head that began as a published one keeps its rotary positions and epsilon, by
    which its logits are compared."""
    unasked = {"target", *(("rope", "sizes") if _is_another_layer(source) else ())}
    found = [one for one in findings(subject) if one.check not in unasked]
    if source.form == "lm":
        return found + same_files(subject, source)
    if subject.form in REPLICAS:
        found += same_states(subject, source)
    is_readable = not {"names", "types", "vocabulary", "head", "tokens", "mask", "keys"} & {one.check for one in found}
    return found + (same_logits(subject, source) if is_readable else [])


def _is_another_layer(source: Source) -> bool:
    """Whether its rotary positions or epsilon are not the target's, as they are of every head that begins here."""
    if source.form not in REPLICAS or source.form == "medusa":
        return False
    head, text = source.config, source.target.config.get_text_config()
    like_target = rope_of(source.target, same_head_dim=True), getattr(text, "rms_norm_eps", head.rms_norm_eps)
    return (plain_rope(head.rope), head.rms_norm_eps) != (plain_rope(like_target[0]), like_target[1])


def report(subject: Subject, found: list[Finding]) -> None:
    """Tell what holds; InputError with all that does not."""
    faulty = {one.check for one in found}
    for check in applicable(subject):
        if check.name not in faulty:
            log.info("ok: %s: %s", check.name, check.says)
    if found:
        raise InputError(
            f"{subject.folder.path} ({subject.form}, for {subject.names}) would not be served as it was trained:\n"
            f"{_lines(found)}"
        )


def _lines(found: list[Finding]) -> str:
    return "\n".join(f"- {one}" for one in found)


def engines_of(name: str, folder: ServedFolder, form: str) -> tuple[Engine, ...]:
    """Those to check for, all being those that a folder was written for; InputError where the one that was asked for
    does not load such drafts."""
    if name == "all":
        known = [engine for engine in ENGINES.values() if isinstance(engine.forms[form], Loads)]
        return tuple(one for one in known if one.title in folder.written_for) or tuple(known)
    how = ENGINES[name].forms[form]
    if isinstance(how, str):
        raise InputError(f"format={name} does not load {folder.path} ({form}): {how}")
    return (ENGINES[name],)
