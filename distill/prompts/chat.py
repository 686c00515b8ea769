"""Chat messages to token ids through the tokenizer's own template, with a mask of what the assistant said.

The mask comes from the template's generation marks where it has them, else from the difference between the text before
and after each assistant turn; either way what it marks is decoded and compared with the messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decode.common.errors import InputError
from distill.corpora.corpus import Message

TELLING = 8  # characters: a shorter message may stand by chance in the marks around the assistant's words
SYSTEM_HINT = (
    ". It takes them without the system's: data.system=drop leaves that out, data.system=merge puts its text before "
    "the user's first message"
)
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str = "chat"
) -> tuple[list[int], list[bool]]:
    """(ids, mask) of a conversation; the mask holds the assistant's words and the token that ends each turn, not what a
    prompt ends by (an empty thought, say), which the target never has to write.

    Raises InputError, naming `where`, where the template refuses the messages or the mask does not decode to them.
    """
    text = render(tokenizer, messages, where)
    if not tokenizer.is_fast:
        raise InputError(
            f"{where}: the mask needs a tokenizer that reports offsets, and {type(tokenizer).__name__} does not"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids: list[int] = list(encoded["input_ids"])  # type: ignore[arg-type]
    offsets: list[tuple[int, int]] = encoded["offset_mapping"]  # type: ignore[assignment]
    if GENERATION_MARK.search(str(tokenizer.get_chat_template())):
        given = [_given_span(tokenizer, messages, turn, text) for turn in _assistant_turns(messages)]
        is_given = [any(begin <= a and b <= end for begin, end in given) for a, b in offsets]
        marks = _marked(tokenizer, messages, where)
        mask = [marked and not by_prompt for marked, by_prompt in zip(marks, is_given, strict=True)]
    else:
        spans = [_turn_span(tokenizer, messages, turn, text, where) for turn in _assistant_turns(messages)]
        mask = [any(a < end and b > begin for begin, end in spans) for a, b in offsets]  # a token on the edge counts
    _verify(tokenizer, messages, ids, mask, where)
    mask[0] = False  # nothing predicts the first token
    return ids, mask


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str = "chat") -> list[int]:
    """Token ids of a conversation up to where the assistant is to speak."""
    return tokenizer(render(tokenizer, messages, where, prompt=True), add_special_tokens=False, verbose=False)[
        "input_ids"
    ]  # type: ignore[return-value]


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str = "chat", prompt: bool = False
) -> str:
    """The conversation as text, with `prompt` up to where the assistant is to speak; InputError where it cannot be."""
    if tokenizer.chat_template is None:
        raise InputError(
            f"{where}: chat messages need a chat template, and {tokenizer.name_or_path or 'this tokenizer'} has none; "
            "use an instruct model, or plain text (data.text_field)"
        )
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)  # type: ignore[return-value]
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        roles = ", ".join(message["role"] for message in messages)
        hint = SYSTEM_HINT if _refuses_system(tokenizer, messages, prompt) else ""
        raise InputError(f"{where}: the chat template refuses these messages ({roles}): {error}{hint}") from error


def _refuses_system(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt: bool) -> bool:
    others = [message for message in messages if message["role"] != "system"]
    if not others or len(others) == len(messages):
        return False
    try:
        tokenizer.apply_chat_template(list(others), tokenize=False, add_generation_prompt=prompt)
    except (TemplateError, ValueError, TypeError, KeyError):
        return False
    return True


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _marked(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str) -> list[bool]:
    encoded = tokenizer.apply_chat_template(list(messages), return_dict=True, return_assistant_tokens_mask=True)
    return [bool(mark) for mark in encoded["assistant_masks"]]  # type: ignore[index]


def _given_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], turn: int, text: str
) -> tuple[int, int]:
    """Where in `text` stands what a prompt puts behind the messages; (0, 0) where it does not stand there."""
    try:
        stem, before = (render(tokenizer, messages[:turn], prompt=prompt) for prompt in (False, True))
    except InputError:  # a template may refuse a beginning that nobody asks about
        return 0, 0
    return (len(stem), len(before)) if text.startswith(before) else (0, 0)


def _turn_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], turn: int, text: str, where: str
) -> tuple[int, int]:
    """Where in `text` the assistant's turn begins and ends, its end mark included."""
    before = start = render(tokenizer, messages[:turn], where, prompt=True)
    if not text.startswith(before):  # a prompt may end by an empty thought, and what was said stand without one
        start = render(tokenizer, messages[:turn], where)
    after = render(tokenizer, messages[: turn + 1], where)
    content = messages[turn]["content"].strip()
    begin = text.find(content, len(start))
    stands = text.startswith(before) or before.startswith(text[: max(0, begin)])
    if begin < 0 or not stands or not after.startswith(start):
        raise InputError(
            f"{where}: the chat template rewrites earlier turns, so message {turn + 1} does not stand in the whole "
            "text as it was said and cannot be marked. Use responses=target, which records each turn with the text "
            "before it"
        )
    end = begin + len(content)
    closing = after[after.index(content, len(start)) + len(content) :].rstrip()
    return len(before) if start is before else begin, end + len(closing) if text.startswith(closing, end) else end


def _verify(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], ids: list[int], mask: list[bool], where: str
) -> None:
    said = tokenizer.decode([token for token, learned in zip(ids, mask, strict=True) if learned])
    place, between = 0, []
    for turn in _assistant_turns(messages):
        content = messages[turn]["content"].strip()
        found = str(said).find(content, place)
        if found < 0:
            raise InputError(
                f"{where}: the learned tokens decode to {said!r:.200}, which lacks the assistant's message {turn + 1}, "
                f"{content!r:.80}; the chat template's marks are wrong, or the tokenizer changes the text. Try show=3"
            )
        between.append(str(said)[place:found])
        place = found + len(content)
    between.append(str(said)[place:])
    for number, message in enumerate(messages, 1):
        content = message["content"].strip()
        if message["role"] != "assistant" and len(content) >= TELLING and any(content in part for part in between):
            raise InputError(
                f"{where}: the learned tokens hold message {number}, {content!r:.80}, which the {message['role']} "
                "said; the chat template's generation marks are wrong. Try show=3"
            )
