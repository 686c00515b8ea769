"""A chat template with the settings of a run written at its head, so that whatever renders chats, or hashes the
template, has them; and what a template reads.

Settings become Jinja statements before the template's own: variables by `set`, a fixed day as a macro in place of
`strftime_now`, which reads the clock (transformers turns a function that is handed to a template into text).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import TemplateError, meta, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from decode.common.errors import InputError
from decode.common.typed_config import require
from decode.config import ChatConfig

CLOCK = "strftime_now"
SYSTEM = {
    "drop": "{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list %}\n",
    "merge": (
        "{%- set _told = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list %}\n"
        "{%- set _merged = namespace(told=_told | select | list, messages=[]) %}\n"
        "{%- for message in messages if message.role != 'system' %}\n"
        "{%- if message.role == 'user' %}\n"
        "{%- set message = dict(message, content=(_merged.told + [message.content]) | join('\\n\\n')) %}\n"
        "{%- set _merged.told = [] %}\n"
        "{%- endif %}\n"
        "{%- set _merged.messages = _merged.messages + [message] %}\n"
        "{%- endfor %}\n"
        "{%- set messages = messages if _merged.told else _merged.messages %}\n"
    ),
}
"""What becomes of system messages; where there is no user message to merge one into, it stays. `data.system` and
`SYSTEM_HINT` (distill/) name these ways too."""
REFUSALS = (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
"""What a template raises that does not take a chat: by raise_exception, or in what it computes."""
DIRECTIVES = (*(f"-{one}" for one in "dmyHIMSj"), *"aAbBcCdDeFfgGhHIjmMpPrRsSTuUVwWxXyYzZ")


def settled(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig, system: str | None = None) -> PreTrainedTokenizerBase:
    """A tokenizer that renders chats by these settings; the one that was handed in stays as it is.

    Raises ConfigError for a variable that its chat template never reads or that is not for users to set, for a day
    that it never asks for, and for settings where there is no chat template.
    """
    asked = {"template": chat.template, "date": chat.date, "system": system}
    asked = {f"data.{name}": value for name, value in asked.items() if value}
    if not asked:
        return tokenizer
    told = ", ".join(f"{name}={value}" for name, value in asked.items())
    require(
        tokenizer.chat_template is not None,
        f"{told} is for a chat template, and the tokenizer of {tokenizer.name_or_path} has none; leave it out",
    )
    _check_variables(tokenizer, chat.template)
    require(
        chat.date is None or reads_clock(tokenizer),
        f"data.date={chat.date}, and the chat template of {tokenizer.name_or_path} never asks what day it is; leave it "
        "out",
    )
    head = "".join(f"{{%- set {name} = {value!r} %}}\n" for name, value in chat.template.items())
    head += "" if chat.date is None else _clock_at(datetime.fromisoformat(chat.date))
    head += "" if system is None else SYSTEM[system]
    found = copy.copy(tokenizer)  # the tables of tokens are shared
    found.chat_template = {name: head + text for name, text in _named(tokenizer)}
    if not isinstance(tokenizer.chat_template, dict):
        found.chat_template = found.chat_template["default"]
    return found


def drops_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it leaves system messages out because it was asked to."""
    return any(SYSTEM["drop"] in text for _, text in _named(tokenizer))


def reads_clock(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether chats of another day are other texts."""
    templates = [] if tokenizer is None else [text for _, text in _named(tokenizer)]
    return any(CLOCK in _names(text) for text in templates)


def _named(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, str]]:
    template: Any = tokenizer.chat_template
    if template is not None:
        yield from template.items() if isinstance(template, dict) else [("default", template)]


def _check_variables(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
    special = {*tokenizer.SPECIAL_TOKENS_ATTRIBUTES, *tokenizer.special_tokens_map}  # there or not, templates read them
    own = {"messages", CLOCK, *inspect.signature(tokenizer.apply_chat_template).parameters, *special}
    taken = sorted(own & variables.keys())
    require(
        not taken,
        f"data.template sets {', '.join(taken)}, which every call sets by itself"
        + (" (the day: data.date)" if CLOCK in taken else "")
        + "; leave it out",
    )
    readable = sorted(set().union(*(_variables(text) for _, text in _named(tokenizer))) - own)
    unknown = sorted(variables.keys() - set(readable))
    require(
        not unknown,
        f"data.template sets {', '.join(unknown)}, which the chat template of {tokenizer.name_or_path} never reads, so "
        f"that chats would be as without it; it reads {', '.join(readable) or 'no variable'}",
    )


@cache
def _variables(template: str) -> frozenset[str]:
    return frozenset(meta.find_undeclared_variables(_parsed(template)))


@cache
def _names(template: str) -> frozenset[str]:
    """All names in it, those that Jinja or transformers define among them."""
    return frozenset(one.name for one in _parsed(template).find_all(nodes.Name))


def _parsed(template: str) -> nodes.Template:
    try:
        return _compile_jinja_template(template).environment.parse(template)
    except TemplateError as error:
        raise InputError(f"the chat template is no Jinja template ({error}); copy the tokenizer again") from error


def _clock_at(day: datetime) -> str:
    """A macro that writes the day in any format, as strftime does."""
    written = "".join(f" | replace({f'%{one}'!r}, {day.strftime(f'%{one}')!r})" for one in DIRECTIVES)
    percent = "\x00"  # of a %% in the format, which begins no directive
    body = f"format | replace('%%', {percent!r}){written} | replace({percent!r}, '%')"
    return f"{{%- macro {CLOCK}(format) -%}}{{{{ {body} }}}}{{%- endmacro %}}\n"
