"""The prompts that every arm continues: windows of held-out documents, or the questions of a benchmark file.

Spec-Bench, SPEED-Bench and MT-Bench share one JSONL layout: `question_id`, `category` and `turns`, a list of user
messages;
prepared copies may hold chat `messages` instead, of which the user's are the turns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode.common.errors import ConfigError, InputError
from distill.corpora.row_files import checked_text
from distill.prompts.chat import encode_prompt
from distill.prompts.held_out_count import LEAST_PROMPTS
from distill.prompts.tokenizer import start_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.corpora import Document
    from distill.corpora.corpus import Split
    from eval.config import EvalConfig, PromptsConfig

DEEPEST_DRAFT = 32
"""Positions kept free behind a continuation for a draft that is longer than what is left to write."""
_WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"
_LAYOUT = 'one object per line such as {"question_id": 81, "category": "writing", "turns": ["..."]}'


@dataclass(frozen=True)
class Question:
    """One line of a prompt file."""

    id: str
    category: str | None
    turns: tuple[str, ...]
    opening: tuple[dict[str, str], ...] = ()
    """Messages before the first turn, such as the system's."""


@dataclass(frozen=True)
class Prompt:
    """Token ids that all arms are given; `history` holds the chat so far, `later` the user's turns still to come."""

    id: str
    category: str | None
    ids: tuple[int, ...]
    history: tuple[dict[str, str], ...] = ()
    later: tuple[str, ...] = ()
    document: str = ""
    """The document or conversation that several prompts come from; empty where this is its only one."""

    @property
    def unit(self) -> str:
        """What is resampled whole: prompts of one document are no independent witnesses."""
        return self.document or self.id


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


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a JSONL file in one of the three layouts; InputError names file and line of the first bad
    one."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"prompts.file={path} does not exist; name a JSONL file with {_LAYOUT}")
    questions = []
    try:
        # utf-8-sig: editors write a byte-order mark; splitlines would cut at U+2028 in a text
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error}); the file must hold {_LAYOUT}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            questions.append(_question(line, f"{path}:{number}", number))
    if not questions:
        raise InputError(f"{path} holds no question; it must hold {_LAYOUT}")
    return questions


def _question(line: str, where: str, number: int) -> Question:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # malformed, a number of 5,000 digits, or lists 1,000 deep
        raise InputError(f"{where}: not JSON ({error}); expected {_LAYOUT}") from error
    if not isinstance(entry, dict):
        raise InputError(f"{where}: a {type(entry).__name__}, not an object; expected {_LAYOUT}")
    turns = _turns(entry, where)
    opening = _opening(entry["messages"]) if entry.get("turns") is None else ()
    category = entry.get("category")
    if category is not None and not isinstance(category, str):
        raise InputError(f"{where}: category {category!r} is not text; leave it out or name one")
    name = checked_text(str(entry.get("question_id", number)), where)
    return Question(name, None if category is None else checked_text(category, where), tuple(turns), opening)


def _turns(entry: dict[str, Any], where: str) -> list[str]:
    turns = entry.get("turns")
    if turns is None and isinstance(entry.get("messages"), list):
        messages = entry["messages"]
        if not all(isinstance(message, dict) for message in messages):
            raise InputError(f"{where}: messages must be objects with role and content")
        if not all(isinstance(message.get(key), str) for message in messages for key in ("role", "content")):
            raise InputError(f"{where}: each message needs role and content as text")
        turns = [checked_text(message["content"], where) for message in messages]
        turns = [turn for turn, message in zip(turns, messages, strict=True) if message["role"] == "user"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InputError(f"{where}: turns {_short(turns)} is not a list of non-empty texts; expected {_LAYOUT}")
    if any(_WITHHELD in turn for turn in turns):
        raise InputError(
            f"{where}: the text was withheld for its licence; prepare the data set with its own script first"
        )
    return [checked_text(turn, where) for turn in turns]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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


def check_room(prompts: Iterable[Prompt], new_tokens: int, max_positions: int) -> None:
    """InputError for the first prompt that leaves no room for `new_tokens` more."""
    for prompt in prompts:
        if len(prompt.ids) + new_tokens > max_positions:
            raise InputError(
                f"prompt {prompt.id!r} has {len(prompt.ids)} tokens, and with {new_tokens} more (the "
                f"longest continuation and a draft) exceeds the {max_positions} positions that target and drafts "
                "share; the text would be cut. "
                "Lower prompts.tokens, decode.max_new_tokens or lossless.tokens, or drop the prompt from the file"
            )


def as_many_as(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, wanted: int) -> list[Prompt]:
    """Up to `wanted` prompts of the run's source, none set apart; ConfigError where there is not one."""
    if cfg.prompts.file is not None:
        questions = _spread(read_questions(cfg.prompts.file), cfg.prompts.limit)[:wanted]
        return [first_turn(question, tokenizer, max_turns=1) for question in questions]
    return _prompts_of_split(cfg, tokenizer, "heldout", wanted, 1)


def _questions(cfg: EvalConfig) -> list[Question]:
    """At most prompts.limit of prompts.file, such that every prefix holds its categories in equal shares."""
    assert cfg.prompts.file is not None
    return _by_turns_of_category(_spread(read_questions(cfg.prompts.file), cfg.prompts.limit))


def file_prompts(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The first turns of prompts.file, such that every prefix holds its categories in equal shares."""
    return [first_turn(question, tokenizer, max_turns=1) for question in _questions(cfg)]


def _from_file(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSets:
    questions = _questions(cfg)
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


def _spread(questions: list[Question], limit: int | None) -> list[Question]:
    """`limit` questions at even distances, since benchmark files are sorted by category."""
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i * len(questions) // limit] for i in range(limit)]


def _by_turns_of_category(questions: list[Question]) -> list[Question]:
    """Reordered so that every prefix holds the categories in equal shares."""
    groups: dict[str | None, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    return [question for question in chain.from_iterable(zip_longest(*groups.values())) if question is not None]


def first_turn(question: Question, tokenizer: PreTrainedTokenizerBase, max_turns: int) -> Prompt:
    """The question's first turn as token ids, wrapped in the chat template where the tokenizer has one."""
    blank = Prompt(question.id, question.category, (), question.opening, question.turns[:max_turns])
    return _ask(blank, tokenizer)


def next_turn(prompt: Prompt, answer: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The prompt that follows once the target has given `answer`; call it only while `prompt.later` is not empty."""
    return _ask(replace(prompt, history=(*prompt.history, {"role": "assistant", "content": answer})), tokenizer)


def _ask(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    turn, *later = prompt.later
    history = (*prompt.history, {"role": "user", "content": turn})
    number = sum(message["role"] == "user" for message in history)
    first = prompt.id if number <= 2 else prompt.id.rsplit("#", 1)[0]
    name = first if number == 1 else f"{first}#{number}"
    return Prompt(name, prompt.category, tuple(_encode(history, tokenizer, name)), history, tuple(later), first)


def _encode(history: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message["content"] for message in history))["input_ids"])
    return encode_prompt(tokenizer, history, f"prompt {name!r}")


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
    from distill.corpora import load_corpus

    windows = held_out_prompts(load_corpus(cfg.data).documents(split), tokenizer, cfg.prompts, wanted, cfg.seed)
    if len(windows) < wanted:
        raise ConfigError(
            f"the {split} split of data={cfg.data.name} gives {len(windows)} prompts "
            f"(prompts.tokens={cfg.prompts.tokens}), and {wanted} are needed ({reason}); lower these or prompts.tokens"
        )
    return windows


def _prompts_of_split(
    cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, split: Split, wanted: int, least: int
) -> list[Prompt]:
    """Up to `wanted` prompts from a split of cfg.data; ConfigError where there are not even `least`. Other shares are
    no way out: drafts were trained by these, so part of the prompts would be text that they have seen."""
    from distill.corpora import load_corpus
    from distill.corpora.corpus import EmptySplitError

    try:
        documents = list(load_corpus(cfg.data).documents(split))
    except EmptySplitError:
        documents = []
    windows = held_out_prompts(documents, tokenizer, cfg.prompts, wanted, cfg.seed)
    if len(windows) < least:
        is_text = any(document.text is not None for document in documents)
        shorter = f", shorten prompts.tokens={cfg.prompts.tokens}" if is_text else ""
        few = _as_few(len(windows)) if split == "heldout" else ""
        raise ConfigError(
            f"the {split} split of data={cfg.data.name} gives {len(windows)} prompts, of {len(documents)} documents, "
            f"and {least} are wanted at least. Add documents, of which the split gets its share{shorter}, or give "
            f"questions of your own in prompts.file (JSONL){few}"
        )
    return windows


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
    order.
    """
    rng = random.Random(seed)
    return in_turn([_prompts_of(document, tokenizer, cfg, rng)[:wanted] for document in documents], wanted, rng)


def in_turn(per_document: list[list[Prompt]], wanted: int, rng: random.Random) -> list[Prompt]:
    """Up to `wanted` prompts, the documents giving one each in turn, in a drawn order."""
    rng.shuffle(per_document)
    turns = chain.from_iterable(zip_longest(*per_document))
    return [prompt for prompt in turns if prompt is not None][:wanted]


def _opening(messages: Sequence[dict[str, str]]) -> tuple[dict[str, str], ...]:
    """What stands before the user's first turn: the system's message, where there is one."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    return tuple(dict(message) for message in messages[:first])


def _prompts_of(
    document: Document, tokenizer: PreTrainedTokenizerBase, cfg: PromptsConfig, rng: random.Random
) -> list[Prompt]:
    if document.messages is not None:
        turns = tuple(message["content"] for message in document.messages if message["role"] == "user")
        question = Question(document.id, document.category, turns, _opening(document.messages))
        return [first_turn(question, tokenizer, cfg.max_turns)] if turns else []
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
