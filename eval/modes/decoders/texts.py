"""The prompts of the comparison, by kind of text (code and prose, or the kinds of a file): some to report, others to
choose on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.config import EvalConfig
from eval.prompts.kinds import TextPrompts, corpus_prompts, file_prompts
from eval.prompts.prompt import DEEPEST_DRAFT, Prompt, check_room

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.corpora.corpus import Split

_ASKED_BY = "the largest batch times its count in decoders.batches_timed, or times decoders.screening_batches, or "
_ASKED_BY += "decoders.screening_prompts"


def load_texts(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> dict[str, TextPrompts]:
    """Kind of text -> prompts. ConfigError where the corpus gives too few, InputError where one is too long."""
    sizes = cfg.decoders.num_timed
    reported = max(rows * count for rows, count in sizes.items())
    screening = max(rows * cfg.decoders.batches_screened(rows) for rows in sizes)
    if cfg.prompts.file is not None:
        found = file_prompts(cfg, tokenizer, reported, screening, _ASKED_BY)
    else:
        found = {
            kind: TextPrompts(
                _prompts(cfg, tokenizer, kind, "heldout", reported),
                _prompts(cfg, tokenizer, kind, "validation", screening),
            )
            for kind in cfg.decoders.texts
        }
    for prompts in found.values():
        check_room([*prompts.reported, *prompts.screening], cfg.decode.max_new_tokens + DEEPEST_DRAFT, max_positions)
    return found


def _prompts(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, kind: str, split: Split, wanted: int) -> list[Prompt]:
    remedy = "leave this text out of decoders.texts"
    return corpus_prompts(cfg, tokenizer, kind == "prose", split, wanted, _ASKED_BY, remedy)
