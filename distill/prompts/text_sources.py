"""Where the sequences of a run come from: prompts that the target answers, or the records of an earlier run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.common.errors import InputError
from decode.common.progress import get_logger, is_main_process
from decode.common.run_folder import sha256_file
from decode.models.load import ModelDescription
from distill.config import DistillConfig
from distill.corpora import load_corpus
from distill.prompts.drawn_prompts import collect_prompts, digest
from distill.prompts.held_out_count import count_held_out
from distill.prompts.shown_examples import caption, examples, marked
from distill.recording_plan import RecordingPlan, make_plan, plan_of_records
from distill.records.record_folder import RecordFolder
from distill.records.record_shards import Record
from distill.responses import Writer
from distill.runtimes.runtime import Runtime

log = get_logger("distill")


class PromptTexts:
    """Prompts of a corpus with their responses, by the target or from the corpus."""

    origin = "the corpus or the tokenizer"
    """What decides the texts, for messages."""

    def __init__(self, config: DistillConfig, target: ModelDescription) -> None:
        self.config, self.target, self.tokenizer = config, target, _tokenizer(target)
        corpus = load_corpus(config.data)
        own = ", the default; chats or text of your own: data=jsonl data.path=FILE" if config.data.path is None else ""
        log.info("reading prompts from %s (data=%s%s)", corpus.where, config.data.name, own)
        self.prompts = collect_prompts(corpus, self.tokenizer, config)
        self.num_prompts = len(self.prompts)
        self.held_out = count_held_out(corpus, self.tokenizer)
        warning = self.held_out.warning(config.data.heldout_share)
        if warning is not None and is_main_process():
            log.warning("%s", warning)

    @property
    def sha256(self) -> str:
        """What a resumed run has to find again."""
        return digest(self.prompts)

    def plan(self) -> RecordingPlan:
        """What the run would do; raises where it cannot."""
        return make_plan(self.prompts, self.held_out, self.tokenizer, self.target, self.config)

    def examples(self) -> Iterator[str]:
        """The first `show` of them, to be read by a person."""
        return examples(self.prompts, self.tokenizer, self.config)

    def writer(self, runtime: Runtime) -> Writer:
        """What makes the records of a range of prompts, by the target where it is to write."""
        config = self.config
        sampler = runtime.sampler() if config.responses == "target" else None
        return Writer(config, self.tokenizer, sampler, self.target.max_positions, self.prompts)

    def provenance(self) -> dict[str, Any]:
        """What a manifest says of them."""
        return {
            "config": asdict(self.config),
            "responses": self.config.responses,
            "sampling": asdict(self.config.sampling),
            "prompts_sha256": self.sha256,
            "held_out": self.held_out.model_dump(),
        }


class RecordedTexts:
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

    @property
    def sha256(self) -> str:
        return sha256_file(self.folder.path / "manifest.json")

    def plan(self) -> RecordingPlan:
        return plan_of_records(self.folder, self.target, self.config)

    def examples(self) -> Iterator[str]:
        for index in range(min(self.config.show, len(self.folder))):
            record = self._text(index)
            yield caption(record.meta["document"], record.meta["split"])
            yield marked(_tokenizer(self.target), record.ids.tolist(), record.loss_mask.tolist())

    def writer(self, runtime: Runtime) -> RecordedTexts:
        return self

    def write(self, first: int, last: int) -> list[Record]:
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
            "from_records": {"path": str(self.folder.path), "manifest_sha256": self.sha256},
        }

    def _text(self, index: int) -> Record:
        return self.folder.read(index, stores=(), layers=())


Texts = PromptTexts | RecordedTexts
"""Sequences by the number of the prompt that they answer."""


def open_texts(config: DistillConfig, target: ModelDescription) -> Texts:
    """The texts that `config` asks for; ConfigError or InputError where there are none."""
    return RecordedTexts(config, target) if config.responses == "records" else PromptTexts(config, target)


def _tokenizer(target: ModelDescription) -> PreTrainedTokenizerBase:
    if target.tokenizer is None:
        raise InputError(
            f"target.path={target.path} holds no tokenizer files, and prompts are text; add them to the folder"
        )
    if len(target.tokenizer) > target.vocab_size:
        raise InputError(
            f"the tokenizer of {target.path} has {len(target.tokenizer)} entries, and the model only "
            f"{target.vocab_size}: some tokens would have no embedding. Use the tokenizer that the model was trained "
            "with"
        )
    return target.tokenizer
