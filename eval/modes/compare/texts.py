"""The prompts of the comparison, by kind of text: held-out ones to report, others to choose on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from decode.common.errors import ConfigError
from decode.models.compatibility import load_tokenizer
from distill.prompts.tokenizer import encode_texts, start_ids
from eval.modes.compare.arm_set import ArmSet, Target
from eval.modes.compare.drafters_config import TASKS
from eval.prompts.chats import chat_tokenizer
from eval.prompts.held_out import documents_of, enough, held_out_prompts
from eval.prompts.kinds import TextPrompts, file_prompts, prose_prompts
from eval.prompts.prompt import DEEPEST_DRAFT, Prompt, check_room

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.corpora.corpus import Split

PROSE = ("prose", "free")
"""What mode=decoders and mode=drafters call how docstrings begin."""
_OF_FILES = ("python_stdlib", "text", "tasks")
"""Corpora of whole files, of which tasks are made."""


def load_texts(arm_set: ArmSet, target: Target) -> dict[str, TextPrompts]:
    """Kind of text -> prompts in the tokens of its target. ConfigError where there are too few, InputError where one is
    too long."""
    cfg, sizes = arm_set.cfg, arm_set.sizes.num_timed
    tokenizer = chat_tokenizer(cfg) if target.key == "target" else load_tokenizer(target.source)  # tasks are no chats
    reported = max(rows * count for rows, count in sizes.items())
    screening = max(rows * arm_set.sizes.batches_screened(rows) for rows in sizes)
    found = {
        text: TextPrompts(
            _of_split(arm_set, tokenizer, text, "heldout", reported),
            _of_split(arm_set, tokenizer, text, "validation", screening),
        )
        for text in target.texts
        if text not in cfg.prompts.file_kinds
    }
    if len(found) < len(target.texts):
        found |= file_prompts(cfg, tokenizer, reported, screening, arm_set.asked_by)
    for prompts in found.values():
        every = [*prompts.reported, *prompts.screening]
        check_room(every, cfg.decode.max_new_tokens + DEEPEST_DRAFT, target.max_positions)
    return found


def _of_split(
    arm_set: ArmSet, tokenizer: PreTrainedTokenizerBase, text: str, split: Split, wanted: int
) -> list[Prompt]:
    """ConfigError where the split gives fewer, naming the settings that ask for so many."""
    if text in TASKS:
        return _task_prompts(arm_set, tokenizer, text, split, wanted)
    cfg, is_prose = arm_set.cfg, text in PROSE
    documents = documents_of(cfg, tokenizer, split)
    if is_prose:
        prompts = prose_prompts(documents, tokenizer, cfg.prompts.tokens, wanted, cfg.seed)
    else:
        prompts = held_out_prompts(documents, tokenizer, cfg.prompts, wanted, cfg.seed)
    asked = f"{'prose' if is_prose else 'code'}: {arm_set.asked_by}"
    return enough(prompts, wanted, cfg, split, asked, f", or leave this text out of {cfg.mode}.texts")


def _task_prompts(
    arm_set: ArmSet, tokenizer: PreTrainedTokenizerBase, kind: str, split: Split, wanted: int
) -> list[Prompt]:
    """Tasks as the target was trained on them: as texts without a chat template, up to where the answer begins."""
    from distill.corpora.tasks import task_prompts

    cfg = arm_set.cfg
    if cfg.data.name not in _OF_FILES:
        raise ConfigError(
            f"drafters.texts names {kind}, a task that is made of whole files, and data={cfg.data.name} holds none; "
            f"give data=python_stdlib, or data=text data.path=FOLDER, or leave {', '.join(TASKS)} out of drafters.texts"
        )
    tasks = task_prompts(kind, replace(cfg.data, name="tasks"), split, wanted)  # type: ignore[arg-type]
    if len(tasks) < wanted:
        raise ConfigError(
            f"the {split} split of data={cfg.data.name} gives {len(tasks)} tasks of kind {kind}, and {wanted} are "
            f"needed ({arm_set.asked_by}); lower these, give more files, or leave {kind} out of drafters.texts"
        )
    begin = start_ids(tokenizer)  # as records begin
    each = encode_texts(tokenizer, [task.prompt for task in tasks])
    return [
        Prompt(task.id, task.kind, (*begin, *ids), document=task.id.rsplit("#", 1)[0])
        for task, ids in zip(tasks, each, strict=True)
    ]
