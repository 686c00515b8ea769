"""The prompts of a run: windows of held-out documents and the openings of held-out chats, or questions of a file."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from decode.common.errors import ConfigError
from distill.prompts.held_out_count import LEAST_PROMPTS, opening_of
from distill.prompts.tokenizer import start_ids
from eval.prompts.learned_questions import asked_questions
from eval.prompts.prompt import Prompt, check_room
from eval.prompts.questions import by_turns_of_category, first_turn, limited_questions, question_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.corpora.corpus import Document, Split
    from eval.config import EvalConfig
    from eval.prompts.config import PromptsConfig


@dataclass(frozen=True)
class PromptSets:
    """Reported prompts (the first `num_timed` of them are timed) and the separate ones for warm-up and choosing
    settings."""

    reported: list[Prompt]
    num_timed: int
    screening: list[Prompt]

    @property
    def timed(self) -> list[Prompt]:
        """Prompts of the timed run."""
        return self.reported[: self.num_timed]


def load_prompts(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> PromptSets:
    """Prompts of the run, all shorter than the context with room for what is generated.

    Raises InputError for a malformed file or a prompt that does not fit, ConfigError where there are too few prompts.
    """
    if cfg.prompts.file is not None:
        sets = _from_file(cfg, tokenizer)
    else:
        sets = _from_held_out(cfg, tokenizer)
    check_lengths([*sets.reported, *sets.screening], cfg, max_positions)
    return sets


def check_lengths(prompts: Iterable[Prompt], cfg: EvalConfig, max_positions: int) -> None:
    """InputError for the first prompt that leaves no room for the new tokens and a draft in `max_positions`."""
    longest_draft = max(
        [cfg.decode.num_draft_tokens, *cfg.timing.choose_k, *cfg.timing.sweep, *cfg.peers.num_assistant_tokens]
    )
    check_room(prompts, max(cfg.decode.max_new_tokens, cfg.lossless.tokens) + longest_draft, max_positions)


def as_many_as(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, wanted: int) -> list[Prompt]:
    """Up to `wanted` prompts of the run's source, none set apart; ConfigError where there is not one."""
    if cfg.prompts.file is not None:
        questions = limited_questions(cfg.prompts)[:wanted]
        return [first_turn(question, tokenizer, max_turns=1) for question in questions]
    return _prompts_of_split(cfg, tokenizer, "heldout", wanted, 1)


def _from_file(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSets:
    questions = asked_questions(cfg)
    asked = cfg.lossless.prompts + cfg.timing.screening_prompts
    least = min(asked, LEAST_PROMPTS, cfg.prompts.limit or asked)
    if len(questions) < least:
        raise ConfigError(
            f"{cfg.prompts.file} gives {len(questions)} questions, and a report wants {least} at least: over fewer "
            f"prompts an interval says nothing. Add questions{_as_few(len(questions) - 1, screening=True)}"
        )
    num_screening = cfg.timing.screening_prompts
    if len(questions) < asked:  # some to choose by, most to report
        num_screening = min(num_screening, max(1, len(questions) // 4))
    prompts = [first_turn(question, tokenizer, cfg.prompts.max_turns) for question in questions]
    reported = prompts[num_screening:][: cfg.lossless.prompts]
    return PromptSets(reported, min(cfg.timing.prompts, len(reported)), prompts[:num_screening])


def _from_held_out(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSets:
    wanted = cfg.lossless.prompts
    reported = _prompts_of_split(cfg, tokenizer, "heldout", wanted, min(wanted, LEAST_PROMPTS))
    screening = _prompts_of_split(cfg, tokenizer, "validation", cfg.timing.screening_prompts, 1)
    return PromptSets(reported, min(cfg.timing.prompts, len(reported)), screening)


def split_prompts(
    cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, split: Split, wanted: int, reason: str
) -> list[Prompt]:
    """`wanted` prompts from a split of cfg.data; ConfigError where it gives fewer, `reason` naming the settings that
    ask for them."""
    windows = held_out_prompts(documents_of(cfg, tokenizer, split), tokenizer, cfg.prompts, wanted, cfg.seed)
    return enough(windows, wanted, cfg, split, reason)


def enough(
    found: list[Prompt], wanted: int, cfg: EvalConfig, split: Split, reason: str, also: str = ""
) -> list[Prompt]:
    """`found`; ConfigError where they are fewer than `wanted`."""
    if len(found) < wanted:
        raise ConfigError(
            f"the {split} split of data={cfg.data.name} gives {len(found)} prompts "
            f"(prompts.tokens={cfg.prompts.tokens}), and {wanted} are needed ({reason}); lower these or prompts.tokens"
            f"{also}"
        )
    return found


def file_prompts(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, wanted: int, reason: str) -> list[Prompt]:
    """The first turns of `wanted` questions of prompts.file; ConfigError where it gives fewer, as `split_prompts`."""
    questions = asked_questions(cfg)
    if len(questions) < wanted:
        raise ConfigError(
            f"{cfg.prompts.file} gives {len(questions)} questions (prompts.limit={cfg.prompts.limit}), and {wanted} "
            f"are needed ({reason}); lower these or add questions"
        )
    return [first_turn(question, tokenizer, max_turns=1) for question in questions[:wanted]]


def _prompts_of_split(
    cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, split: Split, wanted: int, least: int
) -> list[Prompt]:
    """Up to `wanted` prompts from a split of cfg.data; ConfigError where there are not even `least`. Other shares are
    no way out: drafts were trained by these, so part of the prompts would be text that they have seen."""
    from distill.corpora.corpus import EmptySplitError

    try:
        documents = documents_of(cfg, tokenizer, split)
    except EmptySplitError:
        documents = []
    windows = held_out_prompts(documents, tokenizer, cfg.prompts, wanted, cfg.seed)
    if len(windows) < least:
        is_text = any(document.text is not None for document in documents)
        shorter = f", shorten prompts.tokens={cfg.prompts.tokens}" if is_text else ""
        few = _as_few(len(windows)) if split == "heldout" else ""
        raise ConfigError(
            f"the {split} split of data={cfg.data.name} gives {len(windows)} prompts, of {len(documents)} documents, "
            f"and {least} are wanted at least. Add documents{shorter}, or give your own questions in prompts.file "
            f"(JSONL){few}"
        )
    return windows


def documents_of(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, split: Split) -> list[Document]:
    """Those of a split of cfg.data, less the conversations that nobody opens or whose opening the chat template cannot
    take; InputError where too many of its rows are bad."""
    from distill.corpora.configured import load_corpus

    corpus = load_corpus(cfg.data)
    found = [
        one for one in corpus.documents(split) if one.text is not None or corpus.bad.attempt(opening_of, one, tokenizer)
    ]
    corpus.bad.report()
    return found


def _as_few(prompts: int, screening: bool = False) -> str:
    """What a user may say who wants a report on so few, as a clause."""
    if prompts < 1:
        return ""
    few = f"lossless.prompts={prompts} timing.prompts={prompts}"
    return f", or ask for no more: {few}" + (" timing.screening_prompts=1" if screening else "")


def held_out_prompts(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, cfg: PromptsConfig, wanted: int, seed: int
) -> list[Prompt]:
    """Up to `wanted` prompts, spread over as many documents as possible: windows of text, opening questions of chats.

    The documents take turns in an order drawn from `seed`, each giving its windows (which do not overlap) in a drawn
    order; where documents differ in category, categories take turns, too.
    """
    rng = random.Random(seed)
    per_document = [_prompts_of(document, tokenizer, cfg, rng)[:wanted] for document in documents]
    return by_turns_of_category(in_turn(per_document, sum(map(len, per_document)), rng))[:wanted]


def in_turn(per_document: list[list[Prompt]], wanted: int, rng: random.Random) -> list[Prompt]:
    """Up to `wanted` prompts, the documents giving one each in turn, in a drawn order."""
    rng.shuffle(per_document)
    turns = chain.from_iterable(zip_longest(*per_document))
    return [prompt for prompt in turns if prompt is not None][:wanted]


def _prompts_of(
    document: Document, tokenizer: PreTrainedTokenizerBase, cfg: PromptsConfig, rng: random.Random
) -> list[Prompt]:
    if document.messages is not None:
        question = question_of(document.id, document.category, document.messages)
        return [first_turn(question, tokenizer, cfg.max_turns)] if question.turns else []
    ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
    starts = list(range(0, len(ids) - cfg.tokens + 1, cfg.tokens))
    rng.shuffle(starts)
    begin = start_ids(tokenizer)  # as records begin
    return [
        Prompt(
            f"{document.id}@{start}",
            document.category,
            (*begin, *ids[start : start + cfg.tokens]),
            document=document.id,
        )
        for start in starts
    ]
