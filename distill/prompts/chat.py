"""Chat messages to token ids through the tokenizer's own template, with a mask of what the assistant said.

The mask comes from the template's generation marks where it has them, else from the difference between the text before
and after each assistant turn; either way what it marks is decoded and compared with the messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Sequence
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from decode.common.errors import InputError
from decode.models.chat_template import REFUSALS, drops_system
from distill.corpora.bad_rows import BadRow
from distill.corpora.messages import THOUGHT_FIELDS, Message

TELLING = 8  # characters: a shorter message may stand by chance in the marks around the assistant's words
REWRITES = (
    "the chat template rewrites earlier turns, so a message does not stand in the whole text as it was said and cannot "
    "be marked. Use responses=target, which records each turn with the text before it"
)
PROBE = "90817263"
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

    Raises BadRow, naming `where`, where the template refuses the messages, nothing is learned, or the mask does not
    decode to them; InputError where there is no template or no offsets.
    """
    text = render(tokenizer, messages, where)
    if not _assistant_turns(messages):
        raise BadRow(where, "the assistant says nothing, so there is nothing to learn")
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
    """The conversation as text, with `prompt` up to where the assistant is to speak; InputError where there is no
    template or a broken one, BadRow where it refuses the messages."""
    if tokenizer.chat_template is None:
        raise InputError(
            f"{where}: chat messages need a chat template, and {tokenizer.name_or_path or 'this tokenizer'} has none; "
            "use an instruct model, or plain text (data.text_field)"
        )
    try:
        return _applied(tokenizer, messages, tokenize=False, add_generation_prompt=prompt)
    except TemplateSyntaxError as error:
        raise InputError(f"the chat template of {tokenizer.name_or_path} is broken: {error}") from error
    except REFUSALS as error:
        roles = ", ".join(message["role"] for message in messages)
        hint = SYSTEM_HINT if _refuses_system(tokenizer, messages, prompt) else ""
        raise BadRow(where, "the chat template refuses these messages", f" ({roles}): {error}{hint}") from error


def _refuses_system(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt: bool) -> bool:
    others = [message for message in messages if message["role"] != "system"]
    if not others or len(others) == len(messages):
        return False
    try:
        _applied(tokenizer, others, tokenize=False, add_generation_prompt=prompt)
    except REFUSALS:
        return False
    return True


def check_words(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str, rewritten: Container[int] = ()
) -> None:
    """Raise BadRow where the template leaves out what a message says, a call, a thought before an answer, or the tools.

    The assistant's messages `rewritten` are to be replaced by others. A thought counts where its answer is the last
    message: templates drop those of earlier turns.
    """
    text, seen = render(tokenizer, messages, where), _seen(tokenizer, messages, where)
    if messages[0].get("tools"):
        without = [_less(messages[0], "tools"), *messages[1:]]
        _check_said(text, tokenizer, without, where, "the tools")
    for number, message in enumerate(messages):
        if number in rewritten or (message["role"] == "system" and drops_system(tokenizer)):
            continue
        if number not in seen or message["content"].strip() not in text:  # it may be written as JSON, or in capitals
            without = [*messages[:number], message | {"content": ""}, *messages[number + 1 :]]
            _check_said(text, tokenizer, without, where, f"what the {message['role']} says")
        before = messages[:number]
        for field in (field for field in ("tool_calls", "reasoning_content") if field in message):
            there = render(tokenizer, [*before, message], where)
            _check_said(there, tokenizer, [*before, _less(message, field)], where, field)


def _seen(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str) -> set[int]:
    """Which messages the template writes, told by numbers in place of their words: the words may be in others too."""
    marks = [f"{PROBE}{number:06}{PROBE}" for number in range(len(messages))]
    marked = [one | {"content": mark} if one["content"] else one for one, mark in zip(messages, marks, strict=True)]
    try:
        text = render(tokenizer, marked, where)
    except BadRow:  # the template reads them
        return set()
    return {number for number, one in enumerate(messages) if not one["content"] or marks[number] in text}


def _check_said(
    text: str, tokenizer: PreTrainedTokenizerBase, without: Sequence[Message], where: str, what: str
) -> None:
    try:
        is_said = render(tokenizer, without, where) != text
    except BadRow:  # it cannot do without
        is_said = True
    if not is_said:
        raise BadRow(where, f"the chat template leaves out {what}, and the words would be lost")


def _less(message: Message, field: str) -> Message:
    return {name: value for name, value in message.items() if name != field}


def _applied(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **how: Any) -> Any:
    """What the template makes of the messages, with the tools beside them and thoughts by every name that templates
    read. Most want the arguments of a call as an object; those that fail on it get text."""
    tools = messages[0].get("tools") if messages else None
    said: list[Any] = [_less(one, "tools") for one in messages]
    said = [one | dict.fromkeys(THOUGHT_FIELDS, one.get("reasoning_content")) if "reasoning_content" in one else one
            for one in said]  # fmt: skip
    try:
        return tokenizer.apply_chat_template(said, tools=tools, **how)
    except TypeError:
        if not any("tool_calls" in one for one in said):
            raise
        return tokenizer.apply_chat_template([_with_text_calls(one) for one in said], tools=tools, **how)


def _with_text_calls(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _marked(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str) -> list[bool]:
    encoded = _applied(tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True)
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
    content = _standing(tokenizer, messages[: turn + 1], after, where)
    begin = text.find(content, len(start))
    stands = text.startswith(before) or before.startswith(text[: max(0, begin)])
    if begin < 0 or not stands or not after.startswith(start):
        raise BadRow(where, REWRITES, f" (message {turn + 1})")
    end = begin + len(content)
    closing = after[after.rindex(content, len(start)) + len(content) :].rstrip()  # a thought may hold it, too
    return len(before) if start is before else begin, end + len(closing) if text.startswith(closing, end) else end


def _standing(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], after: str, where: str) -> str:
    """What the last message says, as it stands in any text: its calls where it has some, else its content. A template
    may put an empty thought before them that it leaves out once others have spoken."""
    *before, last = messages
    if not last.get("tool_calls"):
        return last["content"].strip()
    without = render(tokenizer, [*before, _less(last, "tool_calls")], where)
    begin = len(commonprefix([after, without]))
    end = len(after) - len(commonprefix([after[begin:][::-1], without[begin:][::-1]]))
    return after[begin:end]


def _verify(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], ids: list[int], mask: list[bool], where: str
) -> None:
    said = tokenizer.decode([token for token, learned in zip(ids, mask, strict=True) if learned])
    place, between = 0, []
    for turn in _assistant_turns(messages):
        content = messages[turn]["content"].strip()
        found = str(said).find(content, place)
        if found < 0:
            raise BadRow(
                where,
                "the chat template's marks are wrong, or the tokenizer changes the text (try show=3)",
                f": the learned tokens decode to {said!r:.200}, which lacks the assistant's message {turn + 1}, "
                f"{content!r:.80}",
            )
        between.append(str(said)[place:found])
        place = found + len(content)
    between.append(str(said)[place:])
    beside = [str(one.get(field, "")) for one in messages for field in ("reasoning_content", "tool_calls")]
    for number, message in enumerate(messages, 1):
        content = message["content"].strip()
        if message["role"] == "assistant" or len(content) < TELLING or any(content in words for words in beside):
            continue  # a thought may quote what was asked
        if any(content in part for part in between):
            raise BadRow(
                where,
                "the chat template's generation marks are wrong (try show=3)",
                f": the learned tokens hold message {number}, {content!r:.80}, which the {message['role']} said",
            )
