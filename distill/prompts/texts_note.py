"""prompts.json of a run folder: the texts that the run was started with."""

from __future__ import annotations

from pathlib import Path

from decode.common.checked_json import Content, Count, JsonFile, Sha256
from distill.corpora.bad_rows import BadRowCount
from distill.prompts.held_out_count import HeldOutCount


class TextsNote(Content):
    """What a run that goes on has to find again."""

    sha256: Sha256
    """Of all prompts, or of the manifest of the records whose texts are scored again."""
    prompts: Count
    source: Sha256 | None = None
    """Of what the prompts were drawn from: stamps of the corpus's files, and the tokenizer; None where only reading the
    corpus tells."""
    held_out: HeldOutCount | None = None
    bad_rows: BadRowCount | None = None
    """None in the folder of an earlier version."""


NOTE = JsonFile(
    TextsNote,
    "a resumed run could mix its records with those of other texts",
    "Delete the folder, or use another output_dir.",
)


def read_note(run: Path) -> TextsNote | None:
    """That of a run folder, None where there is none yet."""
    file = run / "prompts.json"
    return NOTE.read(file) if file.is_file() else None
