"""Prompts of one kind of text: held-out ones to report, and others, of the validation split, to choose settings on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from decode.common.errors import ConfigError
from eval.comparison_config import OWN
from eval.config import EvalConfig
from eval.prompts.held_out import documents_of, held_out_prompts
from eval.prompts.prompt import Prompt
from eval.prompts.prose import prose_prompts
from eval.prompts.questions import first_turn, questions_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.corpora.corpus import Split


@dataclass(frozen=True)
class TextPrompts:
    """Prompts of one kind of text."""

    reported: list[Prompt]
    screening: list[Prompt]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.ids) for prompt in [*self.reported, *self.screening])


def file_prompts(
    cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, reported: int, screening: int, asked_by: str
) -> dict[str, TextPrompts]:
    """Kind -> the first turns of prompts.file, of which the first ones choose settings; all are of kind `own` where
    prompts.kinds names none. ConfigError where a kind has too few, naming the settings that ask for so many."""
    questions = [first_turn(question, tokenizer, max_turns=1) for question in questions_of(cfg.prompts)]
    found = {}
    for kind in cfg.prompts.file_kinds:
        prompts = [one for one in questions if kind == OWN or one.category == kind]
        if len(prompts) < reported + screening:
            raise ConfigError(
                f"prompts.file={cfg.prompts.file} gives {len(prompts)} prompts of kind {kind}, and {reported} are "
                f"timed and {screening} others settle which settings are ({asked_by}). Add some, raise prompts.limit, "
                f"or lower these, e.g. {cfg.mode}.batch_sizes=[1] {cfg.mode}.batches_timed=[8]"
            )
        found[kind] = TextPrompts(prompts[screening : screening + reported], prompts[:screening])
    return found


def corpus_prompts(
    cfg: EvalConfig,
    tokenizer: PreTrainedTokenizerBase,
    is_prose: bool,
    split: Split,
    wanted: int,
    asked_by: str,
    remedy: str,
) -> list[Prompt]:
    """`wanted` prompts of prompts.tokens tokens from a split of cfg.data: windows of its documents, or how docstrings
    begin; ConfigError where it gives fewer, naming the settings that ask for so many and what to do besides."""
    documents = documents_of(cfg, tokenizer, split)
    if is_prose:
        prompts = prose_prompts(documents, tokenizer, cfg.prompts.tokens, wanted, cfg.seed)
    else:
        prompts = held_out_prompts(documents, tokenizer, cfg.prompts, wanted, cfg.seed)
    if len(prompts) < wanted:
        raise ConfigError(
            f"the {split} split of data={cfg.data.name} gives {len(prompts)} prompts of {cfg.prompts.tokens} tokens of "
            f"{'prose' if is_prose else 'code'}, and {wanted} are needed ({asked_by}); lower these or prompts.tokens, "
            f"or {remedy}"
        )
    return prompts
