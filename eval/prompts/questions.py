"""Questions of a benchmark file, and the prompts that their turns are asked by.

Spec-Bench, SPEED-Bench and MT-Bench share one JSONL layout: `question_id`, `category` and `turns`, a list of user
messages; prepared copies may hold chat `messages` instead, of which the user's are the turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from decode.common.errors import InputError
from distill.corpora.messages import Message, checked_text, read_conversation
from distill.prompts.chat import check_words, encode_prompt
from eval.prompts.prompt import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eval.prompts.config import PromptsConfig

Kept = TypeVar("Kept", Prompt, "Question")
_WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"
_LAYOUT = 'one object per line such as {"question_id": 81, "category": "writing", "turns": ["..."]}'


@dataclass(frozen=True)
class Question:
    """One line of a prompt file."""

    id: str
    category: str | None
    turns: tuple[str, ...]
    opening: tuple[Message, ...] = ()
    """Messages before the first turn, such as the system's."""
    tools: tuple[dict, ...] = ()
    """That the target is offered, as chat templates know them."""


def question_of(name: str, category: str | None, messages: Sequence[Message]) -> Question:
    """The user's turns of a conversation, with what stands before the first one and the tools beside it."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    opening = tuple({key: value for key, value in one.items() if key != "tools"} for one in messages[:first])
    turns = tuple(message["content"] for message in messages if message["role"] == "user")
    return Question(name, category, turns, opening, tuple(messages[0].get("tools", ())))


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a JSONL file in one of the three layouts; InputError names file and line of the first bad
    one."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"prompts.file={path} does not exist; name a JSONL file with {_LAYOUT}")
    questions: list[Question] = []
    lines_of: dict[str, int] = {}
    try:
        # utf-8-sig: editors write a byte-order mark; splitlines would cut at U+2028 in a text
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error}); the file must hold {_LAYOUT}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            questions.append(_question(line, f"{path}:{number}", number))
            first = lines_of.setdefault(questions[-1].id, number)
            if first != number:
                raise InputError(
                    f"{path}:{number}: question_id {questions[-1].id} is that of line {first}, too, and intervals take "
                    "questions of one id as one; give each an id of its own, or leave all ids out"
                )
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
    category = entry.get("category")
    if category is not None and not isinstance(category, str):
        raise InputError(f"{where}: category {category!r} is not text; leave it out or name one")
    category = None if category is None else checked_text(category, where)
    given = entry.get("question_id")
    name = checked_text(str(number if given is None else given), where)
    if entry.get("turns") is None and entry.get("messages") is not None:
        question = question_of(name, category, read_conversation(entry, "messages", where))
        return replace(question, turns=_checked(list(question.turns), where))
    return Question(name, category, _checked(entry.get("turns"), where))


def _checked(turns: Any, where: str) -> tuple[str, ...]:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InputError(f"{where}: turns {_short(turns)} is not a list of non-empty texts; expected {_LAYOUT}")
    if any(_WITHHELD in turn for turn in turns):
        raise InputError(
            f"{where}: the text was withheld for its licence; prepare the data set with its own script first"
        )
    return tuple(checked_text(turn, where) for turn in turns)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def questions_of(cfg: PromptsConfig) -> list[Question]:
    """At most `limit` of `file`, such that every prefix holds its categories (its kinds, where these are named) in
    equal shares."""
    return by_turns_of_category(limited_questions(cfg))


def limited_questions(cfg: PromptsConfig) -> list[Question]:
    """The same in the order of the file."""
    assert cfg.file is not None
    return spread(_of_kinds(read_questions(cfg.file), cfg), cfg.limit)


def _of_kinds(questions: list[Question], cfg: PromptsConfig) -> list[Question]:
    """Each with its kind as its category; InputError where the file has other categories than the kinds name."""
    if not cfg.kinds:
        return questions
    kind_of = {category: kind for kind, categories in cfg.kinds.items() for category in categories}
    found = {question.category for question in questions}
    if found != set(kind_of):
        unnamed, missing = sorted(map(repr, found - set(kind_of))), sorted(set(kind_of) - found)
        raise InputError(
            f"{cfg.file} has not the categories that prompts.kinds names: it lacks {', '.join(missing) or 'none'}, "
            f"and has {', '.join(unnamed) or 'none'} besides. Give the file that has, or take its own: "
            "prompts=held_out prompts.file=FILE"
        )
    return [replace(question, category=kind_of[str(question.category)]) for question in questions]


def spread(questions: list[Question], limit: int | None) -> list[Question]:
    """`limit` questions (all, with None) at even distances, since benchmark files are sorted by category."""
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i * len(questions) // limit] for i in range(limit)]


def by_turns_of_category(found: list[Kept]) -> list[Kept]:
    """Reordered so that every prefix holds the categories in equal shares."""
    groups: dict[str | None, list[Kept]] = {}
    for one in found:
        groups.setdefault(one.category, []).append(one)
    return [one for one in chain.from_iterable(zip_longest(*groups.values())) if one is not None]


def first_turn(question: Question, tokenizer: PreTrainedTokenizerBase, max_turns: int) -> Prompt:
    """The question's first turn as token ids, wrapped in the chat template where the tokenizer has one; InputError
    where that leaves out words."""
    blank = Prompt(question.id, question.category, (), question.opening, question.turns[:max_turns])
    asked = _ask(blank, tokenizer, question.tools)
    if tokenizer.chat_template is not None:
        check_words(tokenizer, asked.history, f"prompt {question.id!r}")
    return asked


def next_turn(prompt: Prompt, answer: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The prompt that follows once the target has given `answer`; call it only while `prompt.later` is not empty."""
    return _ask(replace(prompt, history=(*prompt.history, {"role": "assistant", "content": answer})), tokenizer)


def _ask(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, tools: tuple[dict, ...] = ()) -> Prompt:
    turn, *later = prompt.later
    history: tuple[Message, ...] = (*prompt.history, {"role": "user", "content": turn})
    if tools:  # they ride on the first message
        history = (history[0] | {"tools": list(tools)}, *history[1:])
    number = sum(message["role"] == "user" for message in history)
    first = prompt.id if number <= 2 else prompt.id.rsplit("#", 1)[0]
    name = first if number == 1 else f"{first}#{number}"
    return Prompt(name, prompt.category, tuple(_encode(history, tokenizer, name)), history, tuple(later), first)


def _encode(history: Sequence[Message], tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message["content"] for message in history))["input_ids"])
    return encode_prompt(tokenizer, history, f"prompt {name!r}")
