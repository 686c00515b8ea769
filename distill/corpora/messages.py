"""What a row holds of a conversation, as the messages that chat templates know: role and content, calls of tools, what
was thought before an answer. The tools themselves stand in the first message; `distill.prompts.chat` hands them on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distill.corpora.bad_rows import BadRow

Message = dict[str, Any]
"""role and content, both text; where a row has them tool_calls, reasoning_content, name and tool_call_id; in the first
message tools."""
CALLS = ("tool_calls", "tool_call", "function_call")
"""Fields that hold calls of tools, and roles whose text is one."""
_ROLES = {
    "system": "system, developer",
    "user": "user, human, prompter",
    "assistant": "assistant, gpt, chatgpt, bing, bard, model, ai, bot, chatbot, " + ", ".join(CALLS),
    "tool": "tool, function, observation, tool_response, function_response, ipython",
}
ROLES = {name: role for role, names in _ROLES.items() for name in names.split(", ")}
"""What a speaker is called, in any case -> the role that templates know."""
ROLE_FIELDS = ("role", "from", "speaker")
TEXT_FIELDS = ("content", "value", "text")
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
SYSTEM_FIELDS = ("system", "system_prompt", "system_message")
TOOL_FIELDS = ("tools", "functions")
MEDIA_FIELDS = ("image", "images", "audio", "audios", "video", "videos")
TEXT_PARTS = ("text", "input_text", "output_text")


def read_conversation(row: Mapping, field: str, where: str) -> list[Message]:
    """The messages of `row[field]`, with what stands beside them; BadRow where words would be lost or nobody asks."""
    media = _first(row, MEDIA_FIELDS)
    if media is not None:
        raise BadRow(where, f"{media} beside the conversation: only text is read", f", and it holds {row[media]!r:.80}")
    value = _decoded(row[field], field, where)
    if isinstance(value, Mapping) and all(isinstance(one, list) for one in value.values()):  # columns, not rows
        value = [dict(zip(value, one, strict=False)) for one in zip(*value.values(), strict=False)]
    if not isinstance(value, list) or not value:
        raise BadRow(where, f"{field} must be a list of at least one message", f", and this is {value!r:.80}")
    messages = [read_message(item, f"{where}, message {number}") for number, item in enumerate(value, 1)]
    messages = _with_system(messages, row, where)
    tools = _tools(row, where)
    if tools:
        messages[0]["tools"] = tools
    return messages


def from_first_question(messages: list[Message], where: str) -> tuple[list[Message], bool]:
    """Without what the assistant says before anybody asks (files of cut conversations begin so), and whether there was
    any; also without an empty last answer, which is a place to write one. BadRow where no question is left, or one is
    empty."""
    while messages and messages[-1]["role"] == "assistant" and not _words(messages[-1]):
        messages = messages[:-1]
    speakers = {one["role"] for one in messages}
    first = next((place for place, one in enumerate(messages) if one["role"] == "user"), 0)
    if "user" not in speakers and speakers != {"system", "assistant"}:
        who = "nobody but the assistant speaks" if speakers <= {"assistant"} else "no message is the user's"
        raise BadRow(where, f"{who}, so there is no prompt")
    opening = [one for one in messages[:first] if one["role"] == "system"]
    kept = [*opening, *messages[first:]]
    for one in kept:
        if one["role"] in ("user", "assistant") and not _words(one):
            raise BadRow(where, f"a message of the {one['role']} is empty")
    if "tools" in messages[0]:
        kept[0] = kept[0] | {"tools": messages[0]["tools"]}
    return kept, len(opening) < first


def read_message(item: Any, where: str) -> Message:
    """One message of any layout; BadRow where it has no known role, or what it says is no text."""
    if isinstance(item, str) and item.lstrip().startswith("{"):
        item = _decoded(item, "a message", where)
    if not isinstance(item, Mapping):
        raise BadRow(where, "a message is an object with role and content", f", and this is {item!r:.80}")
    name, role = _role(item, where)
    said: Message = {"role": role, "content": _text(item, where)}
    if name in CALLS:
        said |= {"content": "", "tool_calls": _calls(said["content"], "the call", where)}
    for field in (field for field in CALLS if item.get(field)):
        said["tool_calls"] = _calls(item[field], field, where)
    thought = _first(item, THOUGHT_FIELDS)
    if thought is not None:
        said["reasoning_content"] = _words_of(item[thought], thought, where)
    said |= {key: checked_text(str(item[key]), where) for key in ("name", "tool_call_id") if item.get(key)}
    return said


def checked_text(text: str, where: str) -> str:
    """`text`; raises BadRow for half of a surrogate pair, which JSON can hold and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        before = f"character {error.start + 1} is {half}, "
        raise BadRow(where, "half of a pair: no text. Mend it", before=before) from error
    return text


def names_of(row: Mapping) -> str:
    """The fields of an object, for messages."""
    return ", ".join(map(repr, row)) or "none"


def _role(item: Mapping, where: str) -> tuple[str, str]:
    """What the speaker is called, in small letters, and its role."""
    field = _first(item, ROLE_FIELDS)
    if field is None:
        raise BadRow(where, f"none of {', '.join(ROLE_FIELDS)} says who speaks", f"; its fields are {names_of(item)}")
    name = item[field]
    if not isinstance(name, str):
        raise BadRow(where, f"{field} must be text", f", and this is {name!r:.80}")
    known = name.strip().casefold()
    if known not in ROLES:
        raise BadRow(where, f"{field} names no speaker that is known", f", and is {name!r:.40} ({', '.join(ROLES)})")
    return known, ROLES[known]


def _text(item: Mapping, where: str) -> str:
    field = next((field for field in TEXT_FIELDS if item.get(field) is not None), None)
    if field is not None:
        return _words_of(item[field], field, where)
    if _first(item, (*CALLS, *THOUGHT_FIELDS)) is None:
        raise BadRow(where, f"none of {', '.join(TEXT_FIELDS)} says anything", f"; its fields are {names_of(item)}")
    return ""


def _words_of(value: Any, field: str, where: str) -> str:
    """A text, or the parts of one joined."""
    parts = value if isinstance(value, list) else [value]
    return checked_text("".join(_part(part, field, where) for part in parts), where)


def _part(part: Any, field: str, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") in TEXT_PARTS:
        part = part.get("text")
    if isinstance(part, Mapping):
        raise BadRow(where, f"{field} has a part of type {part.get('type')!r:.40}, and only text is read")
    if not isinstance(part, str):
        raise BadRow(where, f"{field} must be text", f", and this is {part!r:.80}")
    return part


def _with_system(messages: list[Message], row: Mapping, where: str) -> list[Message]:
    """With the system's words that stand in a field of their own."""
    field = _first(row, SYSTEM_FIELDS)
    if field is None:
        return messages
    words = _words_of(row[field], field, where)
    if not words.strip():
        return messages
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": words}, *messages]
    if first["content"].strip() not in ("", words.strip()):
        raise BadRow(where, f"{field} and the system's own message say different things")
    return [first | {"content": words}, *messages[1:]]


def _tools(row: Mapping, where: str) -> list[dict]:
    """The tools beside a conversation, each as templates know it: a function with its name and parameters."""
    field = _first(row, TOOL_FIELDS)
    if field is None:
        return []
    found = _objects(row[field], field, where)
    return [dict(one) if "function" in one else {"type": "function", "function": dict(one)} for one in found]


def _calls(value: Any, field: str, where: str) -> list[dict]:
    """Calls with their arguments as an object, which is what templates write."""
    calls = []
    for one in _objects(value, field, where):
        function = dict(_decoded(one.get("function", one), field, where))
        if not isinstance(function.get("name"), str):
            raise BadRow(where, f"{field} calls a function without a name", f": {one!r:.80}")
        arguments = function.get("arguments", function.get("parameters"))
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            pass  # text that is no JSON is written as it stands
        named = {"id": one["id"]} if isinstance(one.get("id"), str) else {}
        calls.append(
            {"type": "function", **named, "function": {"name": function["name"], "arguments": arguments or {}}}
        )
    return calls


def _objects(value: Any, field: str, where: str) -> list[Mapping]:
    """Objects that may be written as JSON, alone or in a list."""
    value = _decoded(value, field, where)
    found = [_decoded(one, field, where) for one in (value if isinstance(value, list) else [value])]
    if not all(isinstance(one, Mapping) for one in found):
        raise BadRow(where, f"{field} must be objects, or JSON text of them", f", and this is {value!r:.80}")
    checked_text(json.dumps(found, ensure_ascii=False, default=str), where)
    return found


def _decoded(value: Any, field: str, where: str) -> Any:
    """What JSON text says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(where, f"{field} is text that is no JSON", f" ({error}): {value!r:.80}") from error


def _first(item: Mapping, fields: Sequence[str]) -> str | None:
    """The first of `fields` that holds anything."""
    empty: tuple[object, ...] = (None, "", [], {}, "[]", "null")
    return next((field for field in fields if item.get(field) not in empty), None)


def _words(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))
