"""What a run of this stage was started with: its texts, its target and what runs it, so that no others are mixed in."""

from __future__ import annotations

from decode.common.checked_json import Content, JsonFile, Text
from decode.common.errors import InputError
from decode.common.run_folder import RunFolder
from decode.models.describe import ModelDescription
from distill.prompts.text_sources import Texts
from distill.prompts.texts_note import NOTE, read_note
from distill.records.record_manifest import RecordedRuntime
from distill.runtimes.probe import ROUNDING, distance


class TargetNote(Content):
    """target.json: which weights the records are made from, by their files and in memory, and what runs them."""

    fingerprint: Text
    weights: Text | None
    runtime: RecordedRuntime | None = None


_REMEDY = "Delete the folder, or use another output_dir."
TARGET = JsonFile(TargetNote, "records of two targets could be mixed", _REMEDY)
TARGET_FILE = "target.json"


def keep_texts(folder: RunFolder, texts: Texts) -> None:
    """Rank 0: bind the folder to these texts, so that a corpus that changed since a run was killed is not mixed into
    it, and leave in it what the other ranks read."""
    before = read_note(folder.path)
    if before is not None and before.sha256 != texts.sha256:
        raise InputError(
            f"the prompts of {folder.path} had SHA-256 {before.sha256}, and now have {texts.sha256}: {texts.origin} "
            "changed since that run started, and its records would be mixed. Use another output_dir"
        )
    now = texts.keep(folder.path)
    if now != before:
        NOTE.write(folder.file("prompts.json"), now.model_dump())


def check_same_target(folder: RunFolder, target: ModelDescription, runtime: RecordedRuntime, is_main: bool) -> None:
    """The same of the target and of what runs it: files that were replaced under its path, or another engine, would
    make the other half of the records."""
    note = folder.file(TARGET_FILE)
    if not note.is_file():
        if is_main:
            note_target(folder, target, runtime, None)
        return
    before = TARGET.read(note)
    if before.fingerprint != target.fingerprint:
        raise InputError(
            f"target.path={target.path} had fingerprint {before.fingerprint} when the run in {folder.path} started, "
            f"and now has {target.fingerprint}: records of two targets would be mixed. Use another output_dir"
        )
    was = before.runtime
    if was is None:
        return
    if _lasting(was) != _lasting(runtime):
        raise InputError(
            f"the run in {folder.path} was started with {_lasting(was)}, and this is {_lasting(runtime)}: "
            "they round or draw otherwise, and records of both would be mixed. Use another output_dir, or go on with "
            "what it was started with"
        )
    if was.log_p is not None and runtime.log_p is not None:
        far = distance(was.log_p, runtime.log_p)
        if not far <= ROUNDING[runtime.dtype]:
            raise InputError(
                f"the server runs other weights now than when the run in {folder.path} started: log p of a fixed text "
                f"moved by {far:.3g} (rounding: {ROUNDING[runtime.dtype]:g}). Serve the first ones again, or use "
                "another output_dir"
            )


def _lasting(runtime: RecordedRuntime) -> RecordedRuntime:
    """What has to be the same: a server may move, and log p differs by rounding."""
    server = runtime.server and runtime.server.model_copy(update={"url": "any"})
    return runtime.model_copy(update={"log_p": None, "server": server})


def note_target(folder: RunFolder, target: ModelDescription, runtime: RecordedRuntime, weights: str | None) -> None:
    """Write target.json; `weights` is the fingerprint of those in memory, where they are known."""
    told = {"fingerprint": target.fingerprint, "weights": weights, "runtime": runtime.model_dump()}
    TARGET.write(folder.file(TARGET_FILE), told)


def noted_weights(folder: RunFolder) -> str | None:
    """Fingerprint of the weights that made the records; a run that an earlier version started may not know it."""
    note = folder.file(TARGET_FILE)
    return TARGET.read(note).weights if note.is_file() else None
