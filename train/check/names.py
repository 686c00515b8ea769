"""Names and shapes, read as each engine's own loader reads them: nothing missing, nothing that it skips or refuses."""

from __future__ import annotations

from collections.abc import Iterator

from train.check.subject import UNCLEAR, Finding, Subject
from train.export.engines.base import Engine

_SHOWN = 6
_FILL = {
    "random": "{engine} leaves them random without a word, and nearly every draft token would be refused",
    "refused": "{engine} refuses to load the folder",
}
_PASS = {
    "skipped": "{engine} skips them without a word, so that what they should fill stays random",
    "refused": "{engine} refuses to load the folder",
}


def names_and_shapes(subject: Subject) -> Iterator[Finding]:
    """Of every engine; the tensors that config.json calls for are those of the form's layout."""
    for engine in subject.engines:
        try:
            subject.manifest(engine)
        except UNCLEAR as error:
            yield Finding(
                f"config.json does not say which tensors there are ({type(error).__name__}: {_line(error)})",
                f"{engine.title} cannot make room for them, or takes its own defaults",
                "Write the key",
            )
            continue
        yield from _against(subject, engine)


def _against(subject: Subject, engine: Engine) -> Iterator[Finding]:
    wanted, found = subject.manifest(engine), subject.renamed(engine)
    rules, stored = subject.loads(engine).names, subject.folder.stored
    absent = {theirs for theirs in wanted.keys() - found.keys() if not rules.shares(theirs)}
    called_for = subject.called_for(engine)
    missing = [name for name, spec in called_for.items() if not spec.optional and rules.renamed(name) in absent]
    unknown = [own for theirs, own in found.items() if theirs not in wanted]
    if missing:
        yield Finding(
            f"tensors that config.json calls for are missing: {_list(missing)}",
            _FILL[rules.missing].format(engine=engine.title),
            "Write them, or correct the key of config.json that calls for them",
        )
    if unknown:
        yield Finding(
            f"tensors that {engine.title} does not know under these names, of which config.json calls for none: "
            f"{_list(unknown)}",
            _PASS[rules.unknown].format(engine=engine.title),
            "Name them as the engine does, or take them out",
        )
    for theirs, own in found.items():
        if theirs in wanted and not wanted[theirs].takes(tuple(stored[own].shape)):
            yield Finding(
                f"{own} has the shape {stored[own].shape}, and config.json calls for {wanted[theirs].shape}",
                f"{engine.title} refuses to load the folder, or makes room for another head",
                "Correct the sizes in config.json, or write the tensor anew",
            )
    twice = len(stored) - len({rules.renamed(name) for name in stored})
    if twice:
        yield Finding(
            f"{twice} tensors have the same name once {engine.title} has renamed them",
            "it keeps the last one that it reads",
            "Take the others out",
        )


def _line(error: Exception) -> str:
    """transformers' own are of several."""
    return " ".join(str(error).split())


def _list(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + rest
