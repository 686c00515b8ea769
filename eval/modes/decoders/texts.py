"""The prompts of the comparison, by kind of text: code and prose; held-out ones to report, others to choose on."""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from distill.prompts.tokenizer import start_ids
from eval.prompts.held_out import Prompt, in_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.corpora import Document
from dataclasses import dataclass

from decode.common.errors import ConfigError
from eval.config import EvalConfig
from eval.prompts.held_out import DEEPEST_DRAFT, check_room, held_out_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.corpora.corpus import Split

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


@dataclass(frozen=True)
class TextPrompts:
    """Prompts of one kind of text."""

    reported: list[Prompt]
    screening: list[Prompt]


def load_texts(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> dict[str, TextPrompts]:
    """Kind of text -> prompts. ConfigError where the corpus gives too few, InputError where one is too long."""
    sizes = cfg.decoders.num_timed
    reported = max(rows * count for rows, count in sizes.items())
    screening = max(rows * cfg.decoders.batches_screened(rows) for rows in sizes)
    found = {
        kind: TextPrompts(
            _prompts(cfg, tokenizer, kind, "heldout", reported), _prompts(cfg, tokenizer, kind, "validation", screening)
        )
        for kind in cfg.decoders.texts
    }
    for prompts in found.values():
        check_room([*prompts.reported, *prompts.screening], cfg.decode.max_new_tokens + DEEPEST_DRAFT, max_positions)
    return found


def _prompts(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, kind: str, split: Split, wanted: int) -> list[Prompt]:
    from distill.corpora import load_corpus

    documents = load_corpus(cfg.data).documents(split)
    if kind == "code":
        prompts = held_out_prompts(documents, tokenizer, cfg.prompts, wanted, cfg.seed)
    else:
        prompts = prose_prompts(documents, tokenizer, cfg.prompts.tokens, wanted, cfg.seed)
    if len(prompts) < wanted:
        raise ConfigError(
            f"the {split} split of data={cfg.data.name} gives {len(prompts)} prompts of {cfg.prompts.tokens} tokens of "
            f"{kind}, and {wanted} are needed (the largest batch times its count in decoders.batches_timed, or times "
            "decoders.screening_batches, or decoders.screening_prompts); lower these or prompts.tokens, or leave this "
            "text out of decoders.texts"
        )
    return prompts
