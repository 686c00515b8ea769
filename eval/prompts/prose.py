"""Prose in sources: how docstrings begin, as prompts."""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from distill.prompts.tokenizer import start_ids
from eval.prompts.held_out import in_turn
from eval.prompts.prompt import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.corpora import Document

_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


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
