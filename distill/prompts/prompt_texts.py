"""Texts that begin with prompts of a corpus. Rank 0 reads the corpus, once in a run; the others, and a run that goes
on, read the prompts that it left in the run's folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

import numpy as np

from decode.common.progress import get_logger
from decode.models.chat_template import settled
from decode.models.describe import ModelDescription
from distill.config import DistillConfig
from distill.corpora.bad_rows import BadRowCount
from distill.corpora.config import DataConfig
from distill.corpora.configured import load_corpus
from distill.corpora.text_files import stdlib_files
from distill.prompts.drawn_prompts import DrawnPrompt, digest, draw_prompts
from distill.prompts.held_out_count import HeldOutCount, count_held_out
from distill.prompts.shown_examples import examples
from distill.prompts.texts_note import TextsNote, read_note
from distill.prompts.tokenizer import tokenizer_hash, tokenizer_of
from distill.recording_plan import RecordingPlan, make_plan
from distill.responses import Writer
from distill.runtimes.runtime import Runtime

LINES, STARTS = "prompts.jsonl", "starts.npy"


def write_prompts(prompts: Iterable[DrawnPrompt], folder: Path) -> PromptFile:
    """Write them to a new folder, one at a time."""
    folder.mkdir()
    starts = array("q", [0])
    with (folder / LINES).open("wb") as file:
        for prompt in prompts:
            starts.append(starts[-1] + file.write(json.dumps(astuple(prompt)).encode() + b"\n"))
    np.save(folder / STARTS, np.array(starts, np.int64))
    return PromptFile(folder)


class PromptFile(Sequence[DrawnPrompt]):
    """The prompts in a folder, by number; mapped, so that the ranks of a machine share what is in memory of them."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError and ValueError where it is not whole."""
        self.folder = folder
        self._starts = np.load(folder / STARTS, mmap_mode="r")
        self._lines = np.memmap(folder / LINES, np.uint8, "r")

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> DrawnPrompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[DrawnPrompt]: ...
    def __getitem__(self, index: int | slice) -> DrawnPrompt | list[DrawnPrompt]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        line = self._lines[self._starts[index] : self._starts[index + 1]]
        return DrawnPrompt(*json.loads(line.tobytes()))


def file_stamp(config: DataConfig) -> str | None:
    """SHA-256 of the names, sizes and times of change of the files that a corpus is read from; None for one on the hub,
    which has none here."""
    if config.name == "hub":
        return None
    if config.path is None:
        root, files = stdlib_files()
    else:
        root = Path(config.path)
        files = [root] if root.is_file() else [one for one in root.rglob("*") if one.is_file()]
    return _stamp(files, root)


def _stamp(files: Iterable[Path], root: Path) -> str:
    sha = hashlib.sha256()
    for file in sorted(files):
        found = file.stat()
        sha.update(json.dumps([str(file.relative_to(root)), found.st_size, found.st_mtime_ns]).encode())
    return sha.hexdigest()


FOLDER = "prompts"
log = get_logger("distill")


class PromptTexts(AbstractContextManager):
    """Prompts of a corpus with their responses, by the target or from the corpus."""

    origin = "the corpus or the tokenizer"
    """What decides the texts, for messages."""

    def __init__(self, config: DistillConfig, target: ModelDescription) -> None:
        """Raises what a missing corpus raises; nothing of it is read yet."""
        self.config, self.target = config, target
        self.tokenizer = settled(tokenizer_of(target), config.data, config.data.system)
        self.corpus = load_corpus(config.data)
        self.prompts: Sequence[DrawnPrompt] = ()
        self.sha256: str | None = None
        """Of all prompts; known where they were read."""
        self.held_out: HeldOutCount | None = None
        self.bad_rows: BadRowCount | None = None
        self.source: str | None = None
        """What decides the prompts besides the configuration; None where only reading the corpus tells."""
        self._temporary = ExitStack()

    def __exit__(self, *_: object) -> None:
        self._temporary.close()

    @property
    def num_prompts(self) -> int:
        """Of the run."""
        return len(self.prompts)

    def read(self, run: Path) -> None:
        """Rank 0: the prompts that the run in this folder has kept, where nothing that they were drawn from changed,
        else those of the corpus, which are put aside until there is a folder for them."""
        self.source = self._source_now()  # before anything is read: what changes meanwhile is then noticed later
        kept = None if self.config.plan else self._kept(run)  # a plan may be of another run than the folder holds
        if kept is None:
            self._draw()
            return
        log.info("prompts of %s (%s has not changed since they were drawn)", run / FOLDER, self.corpus.where)
        self.prompts, note = kept
        self.sha256, self.held_out, self.bad_rows = note.sha256, note.held_out, note.bad_rows

    def keep(self, run: Path) -> TextsNote:
        """Rank 0: move what was drawn into the run's folder, and say what it was drawn from."""
        assert isinstance(self.prompts, PromptFile)
        assert self.sha256 is not None
        if self.prompts.folder != run / FOLDER:
            shutil.rmtree(run / FOLDER, ignore_errors=True)
            shutil.move(self.prompts.folder, run / FOLDER)
        return TextsNote(
            sha256=self.sha256,
            prompts=self.num_prompts,
            source=self.source,
            held_out=self.held_out,
            bad_rows=self.bad_rows,
        )

    def open(self, run: Path) -> None:
        """Any rank: those that rank 0 keeps there."""
        self.prompts = PromptFile(run / FOLDER)

    def plan(self) -> RecordingPlan:
        """What the run would do; raises where it cannot."""
        assert self.held_out is not None
        return make_plan(self.prompts, self.held_out, self.bad_rows, self.tokenizer, self.target, self.config)

    def examples(self) -> Iterator[str]:
        """The first `show` of them, to be read by a person."""
        return examples(self.prompts, self.tokenizer, self.config)

    def writer(self, runtime: Runtime) -> Writer:
        """What makes the records of a range of prompts, by the target where it is to write."""
        config = self.config
        sampler = runtime.sampler() if config.responses == "target" else None
        return Writer(config, self.tokenizer, sampler, self.target.max_positions, self.prompts)

    def provenance(self) -> dict[str, Any]:
        """What a manifest says of them; rank 0."""
        assert self.held_out is not None
        return {
            "config": asdict(self.config),
            "responses": self.config.responses,
            "sampling": asdict(self.config.sampling),
            "prompts_sha256": self.sha256,
            "held_out": self.held_out.model_dump(),
            "bad_rows": None if self.bad_rows is None else self.bad_rows.model_dump(),
        }

    def _draw(self) -> None:
        config, corpus = self.config, self.corpus
        own = "; chats or text of your own: data=jsonl data.path=FILE" if config.data.path is None else ""
        log.info("reading prompts from %s (data=%s%s)", corpus.where, config.data.name, own)
        aside = Path(self._temporary.enter_context(TemporaryDirectory(prefix="draftsmith-")))
        self.prompts = write_prompts(draw_prompts(corpus, self.tokenizer, config), aside / FOLDER)
        self.sha256 = digest(self.prompts)
        self.held_out = count_held_out(corpus, self.tokenizer)
        self.bad_rows = corpus.bad.report()
        warning = self.held_out.warning(config.data.heldout_share)
        if warning is not None:
            log.warning("%s", warning)

    def _kept(self, run: Path) -> tuple[PromptFile, TextsNote] | None:
        """None also where the files are damaged: then they are drawn again, and compared."""
        note = read_note(run)
        if note is None or note.held_out is None or note.source is None or note.source != self.source:
            return None
        try:
            found = PromptFile(run / FOLDER)
            return (found, note) if digest(found) == note.sha256 else None
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s cannot be read (%s), so the prompts are drawn again", run / FOLDER, error)
            return None

    def _source_now(self) -> str | None:
        stamp = file_stamp(self.config.data)
        return None if stamp is None else hashlib.sha256((stamp + tokenizer_hash(self.tokenizer)).encode()).hexdigest()
