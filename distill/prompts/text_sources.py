"""Where the sequences of a run come from: prompts that the target answers, or the records of an earlier run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from decode.common.errors import InputError
from decode.common.run_folder import sha256_file
from decode.models.describe import ModelDescription
from distill.config import DistillConfig
from distill.prompts.prompt_texts import PromptTexts
from distill.prompts.shown_examples import caption, marked
from distill.prompts.texts_note import TextsNote
from distill.prompts.tokenizer import tokenizer_of
from distill.recording_plan import RecordingPlan, plan_of_records
from distill.records.record_folder import RecordFolder
from distill.records.record_shards import Record
from distill.responses import Ended, unread
from distill.runtimes.runtime import Runtime


class RecordedTexts(AbstractContextManager):
    """The sequences of a finished record folder of the same target, to be scored again."""

    dropped_turns = 0

    def __init__(self, config: DistillConfig, target: ModelDescription) -> None:
        assert config.from_records is not None, "checked by DistillConfig"
        self.config, self.target = config, target
        self.folder = RecordFolder.open(config.from_records, target)
        if not len(self.folder):
            raise InputError(f"from_records={self.folder.path} holds no record, so there is nothing to score")
        self.origin = f"the records in {self.folder.path}"
        self.num_prompts = int(self.folder.prompts[-1]) + 1

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    @property
    def sha256(self) -> str:
        return sha256_file(self.folder.path / "manifest.json")

    def read(self, run: Path) -> None:
        """They lie in their own folder."""

    def keep(self, run: Path) -> TextsNote:
        return TextsNote(sha256=self.sha256, prompts=self.num_prompts)

    def open(self, run: Path) -> None:
        """They are open."""

    def plan(self) -> RecordingPlan:
        return plan_of_records(self.folder, self.target, self.config)

    def examples(self) -> Iterator[str]:
        for index in range(min(self.config.show, len(self.folder))):
            record = self._text(index)
            yield caption(record.meta["document"], record.meta["split"])
            yield marked(tokenizer_of(self.target), record.ids.tolist(), record.loss_mask.tolist())

    def writer(self, runtime: Runtime) -> RecordedTexts:
        return self

    def write(self, first: int, last: int, ended: Ended = unread) -> list[Record]:
        """The texts as they were recorded; all of a prompt's lie together, as in the run that made them."""
        start, end = np.searchsorted(self.folder.prompts, (first, last))
        return [self._text(index) for index in range(start, end)]

    def provenance(self) -> dict[str, Any]:
        """That of the texts, which tells held-out documents from others, with where they were taken from."""
        before = self.folder.manifest
        told = before.config.model_dump(include={"data", "prompts", "sampling"})
        return {
            "config": asdict(self.config) | told,
            "responses": before.responses,
            "sampling": before.sampling,
            "prompts_sha256": before.prompts_sha256,
            "held_out": None if before.held_out is None else before.held_out.model_dump(),
            "bad_rows": None if before.bad_rows is None else before.bad_rows.model_dump(),
            "from_records": {"path": str(self.folder.path), "manifest_sha256": self.sha256},
        }

    def _text(self, index: int) -> Record:
        return self.folder.read(index, stores=(), layers=())


Texts = PromptTexts | RecordedTexts
"""Sequences by the number of the prompt that they answer."""


def open_texts(config: DistillConfig, target: ModelDescription) -> Texts:
    """The texts that `config` asks for; ConfigError or InputError where there are none."""
    return RecordedTexts(config, target) if config.responses == "records" else PromptTexts(config, target)
