"""A draft's folder as engines read it, and what `python -m train.export` says of the ones that it wrote."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote

from decode.common.checked_json import Content, JsonFile, PlainPath, Sha256, Text
from decode.common.errors import InputError
from decode.common.run_folder import sha256_file
from decode.drafters.provenance import FILE as OWN_FILE
from decode.formats.folder import REMEDY, PublishedFolder, read_folder

FILE = "draftsmith_export.json"
"""What an exported folder says of itself; engines do not read it."""


class ExportFile(Content):
    """What is read of draftsmith_export.json."""

    sha256: dict[PlainPath, Sha256] = {}
    engines: list[Text] = []
    """Titles of those that it was written for."""
    own_head: bool = False
    """It began as a published head: output head, epsilon and rotary positions are not the target's."""


EXPORT = JsonFile(ExportFile, "it says which files were edited since", REMEDY)


@dataclass(frozen=True)
class ServedFolder(PublishedFolder):
    """A draft as an engine is given it, with what `python -m train.export` wrote of it."""

    @property
    def is_ours(self) -> bool:
        """Whether `python -m train.export` wrote it."""
        return (self.path / FILE).is_file()

    @cached_property
    def _export(self) -> ExportFile:
        return EXPORT.read(self.path / FILE) if self.is_ours else ExportFile()

    @property
    def written_for(self) -> list[str]:
        """Titles of the engines that `python -m train.export` wrote it for; empty where it did not."""
        return self._export.engines

    @property
    def has_own_head(self) -> bool:
        """Whether `python -m train.export` wrote it of a head that began as a published one."""
        return self._export.own_head

    @property
    def is_trained_here(self) -> bool:
        """Whether it is ours, and its output head, epsilon and rotary positions are the target's."""
        return self.is_ours and not self.has_own_head

    @cached_property
    def edited(self) -> list[str]:
        """Files for engines that are not as `python -m train.export` wrote them, where it wrote the folder."""
        told = self._export.sha256
        files = {name: self.path / name for name in told if name != "README.md"}
        return [name for name, file in files.items() if not file.is_file() or sha256_file(file) != told[name]]


def open_folder(path: str) -> ServedFolder:
    """The folder at `path`; no values are read. InputError for what is not a draft's folder, and for damaged files."""
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(
            f"draft.path={path} is not a folder here; what a hub holds is fetched first, by "
            f"`hf download {quote(path)}`, say"
        )
    read = read_folder(folder)
    if (folder / OWN_FILE).is_file() and "model_type" not in read.written:
        raise InputError(
            f"draft.path={path} holds a head as draftsmith saves it, which no engine reads. Write it for one first: "
            f"python -m train.export {quote(f'draft.path={path}')} format=vllm output_dir=FOLDER"
        )
    return ServedFolder(folder, read.written, read.stored)
