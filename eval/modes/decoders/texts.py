"""The prompts of the suite, by kind of text: held-out ones that are reported, validation ones to choose settings on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from decode.common.errors import ConfigError
from eval.config import EvalConfig
from eval.prompts.held_out import DEEPEST_DRAFT, Prompt, check_room, held_out_prompts
from eval.prompts.prose import prose_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.corpora.corpus import Split


@dataclass(frozen=True)
class TextPrompts:
    """Prompts of one kind of text."""

    reported: list[Prompt]
    screening: list[Prompt]


def load_texts(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> dict[str, TextPrompts]:
    """Kind of text -> prompts. ConfigError where the corpus gives too few, InputError where one is too long."""
    sizes = cfg.decoders.num_timed
    reported = max(rows * count for rows, count in sizes.items())
    screening = max(sizes) * cfg.decoders.screening_batches
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
            "decoders.screening_batches); lower these or prompts.tokens, or leave this text out of decoders.texts"
        )
    return prompts
