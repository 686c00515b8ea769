"""Prompts of one kind of text: held-out ones to report, and others, of the validation split, to choose settings on."""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decode.common.errors import ConfigError
from distill.prompts.tokenizer import start_ids
from eval.comparison_config import OWN
from eval.config import EvalConfig
from eval.prompts.held_out import in_turn
from eval.prompts.learned_questions import asked_questions
from eval.prompts.prompt import Prompt
from eval.prompts.questions import first_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.corpora.corpus import Document

_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


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
    questions = [first_turn(question, tokenizer, max_turns=1) for question in asked_questions(cfg)]
    found = {}
    for kind in cfg.prompts.file_kinds:
        prompts = [one for one in questions if kind == OWN or one.category == kind]
        if len(prompts) < reported + screening:
            raise ConfigError(
                f"prompts.file={cfg.prompts.file} gives {len(prompts)} prompts of kind {kind}, not {reported} to time "
                f"and {screening} to choose by ({asked_by}). Add some, raise prompts.limit, or lower "
                f"{cfg.mode}.batch_sizes or batches_timed"
            )
        found[kind] = TextPrompts(prompts[screening : screening + reported], prompts[:screening])
    return found


def prose_prompts(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, tokens: int, wanted: int, seed: int
) -> list[Prompt]:
    """Up to `wanted` prompts of `tokens` tokens, each the beginning of another docstring, spread over the documents."""
    rng = random.Random(seed)
    begin = start_ids(tokenizer)  # as records begin
    per_document = []
    for document in documents:
        found = []
        for line, text in docstrings(document.text or ""):
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
            if len(ids) == tokens:
                found.append(Prompt(f"{document.id}:{line}", "prose", (*begin, *ids), document=document.id))
        rng.shuffle(found)
        per_document.append(found)
    return in_turn(per_document, wanted, rng)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text without its indentation) of every docstring; nothing where `source` is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the interpreter's own remarks on escapes in the source
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, _WITH_DOCSTRING) else None
        if text:
            yield getattr(node, "lineno", 1), text
