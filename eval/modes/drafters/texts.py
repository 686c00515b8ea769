"""The prompts of the comparison, by kind of text: held-out ones to report, others to choose on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from decode.common.errors import ConfigError
from distill.prompts.tokenizer import encode_texts, start_ids
from eval.comparison_config import OWN
from eval.config import EvalConfig
from eval.modes.drafters.config import TASKS, as_known
from eval.prompts.kinds import TextPrompts, corpus_prompts, file_prompts
from eval.prompts.prompt import DEEPEST_DRAFT, Prompt, check_room

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.corpora.corpus import Split
    from distill.corpora.tasks import Task

_ASKED_BY = "the largest batch times its count in drafters.batches_timed, or drafters.screening_prompts"
_OF_FILES = ("python_stdlib", "text", "tasks")
"""Corpora of whole files, of which tasks are made."""


def load_texts(
    cfg: EvalConfig, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_positions: int
) -> dict[str, TextPrompts]:
    """Kind of text -> prompts in the tokens of one target. ConfigError where there are too few, InputError where one is
    too long."""
    of_file = [text for text in texts if as_known(text) == OWN]
    found = {text: _of_corpus(cfg, tokenizer, text) for text in texts if text not in of_file}
    if of_file:
        found |= file_prompts(cfg, tokenizer, *_counts(cfg), _ASKED_BY)
    for prompts in found.values():
        check_room([*prompts.reported, *prompts.screening], cfg.decode.max_new_tokens + DEEPEST_DRAFT, max_positions)
    return found


def _counts(cfg: EvalConfig) -> tuple[int, int]:
    """Prompts of a text that are reported, and that settings are chosen on."""
    sizes = cfg.drafters.num_timed
    reported = max(rows * count for rows, count in sizes.items())
    return reported, max(rows * cfg.drafters.batches_screened(rows) for rows in sizes)


def _of_corpus(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, text: str) -> TextPrompts:
    reported, screening = _counts(cfg)
    return TextPrompts(
        _of_split(cfg, tokenizer, text, "heldout", reported), _of_split(cfg, tokenizer, text, "validation", screening)
    )


def _of_split(
    cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, text: str, split: Split, wanted: int
) -> list[Prompt]:
    if text not in TASKS:
        remedy = "leave this text out of drafters.texts"
        return corpus_prompts(cfg, tokenizer, text == "free", split, wanted, _ASKED_BY, remedy)
    return _task_prompts(cfg, tokenizer, text, split, wanted)


def _task_prompts(
    cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, kind: str, split: Split, wanted: int
) -> list[Prompt]:
    """Tasks as the target was trained on them: as texts without a chat template, up to where the answer begins."""
    from distill.corpora.tasks import task_prompts

    if cfg.data.name not in _OF_FILES:
        raise ConfigError(
            f"drafters.texts names {kind}, a task that is made of whole files, and data={cfg.data.name} holds none; "
            f"give data=python_stdlib, or data=text data.path=FOLDER, or leave {', '.join(TASKS)} out of drafters.texts"
        )
    tasks = task_prompts(kind, replace(cfg.data, name="tasks"), split, wanted)  # type: ignore[arg-type]
    if len(tasks) < wanted:
        raise ConfigError(
            f"the {split} split of data={cfg.data.name} gives {len(tasks)} tasks of kind {kind}, and {wanted} are "
            f"needed ({_ASKED_BY}); lower these, give more files, or leave {kind} out of drafters.texts"
        )
    begin = start_ids(tokenizer)  # as records begin
    each = encode_texts(tokenizer, [task.prompt for task in tasks])
    return [_prompt(task, [*begin, *ids]) for task, ids in zip(tasks, each, strict=True)]


def _prompt(task: Task, ids: list[int]) -> Prompt:
    return Prompt(task.id, task.kind, tuple(ids), document=task.id.rsplit("#", 1)[0])
