"""Settings of a chat template: what they change in the text, and which are refused."""

from copy import copy
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from decode.common.errors import ConfigError, InputError
from decode.config import ChatConfig
from decode.models.chat_template import DIRECTIVES, reads_clock, settled
from tests.commands import built
from tests.tiny import tiny_tokenizer

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
DATED = (  # as Llama 3.1's
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}{%- endif %}Today: {{ date_string }}\n' + CHAT
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Bye."},
]


trained = cache(tiny_tokenizer)


def tokenizer_with(template: str | dict[str, str] | None) -> PreTrainedTokenizerFast:
    tokenizer = copy(trained())
    tokenizer.chat_template = template  # type: ignore[assignment]
    return tokenizer


def written(text: str | dict[str, str], system: str | None = None, **chat: object) -> str:
    tokenizer = settled(tokenizer_with(text), ChatConfig(**chat), system)  # type: ignore[arg-type]
    return str(tokenizer.apply_chat_template(MESSAGES, tokenize=False))


@pytest.mark.parametrize(
    "value", [False, None, 3, 0.5, 'it\'s "so" %} {{ 1 }}\n', ["a", {"b": None}], {"c": [True]}], ids=repr
)
def test_a_variable_reaches_the_template_as_it_is(value: object) -> None:
    assert written("{{ level | string }}", template={"level": value}) == str(value)


@pytest.mark.parametrize("start", ["", "\n", "  {% if true %}a{% endif %}\n\n", "{{- 'a' }}", "  a\n{#- b -#}\n"])
def test_settings_add_no_text_of_their_own(start: str) -> None:
    template = start + "{% if x is defined %}{{ x }}{% endif %}{{ strftime_now('') }}" + CHAT
    chat = {"template": {"x": ""}, "date": "2026-08-01"}
    assert written(template, **chat) == written(template)
    for system in ("drop", "merge"):
        assert written(template, system, **chat).split("[")[0] == written(template).split("[")[0]


def test_a_day_stands_in_every_format_as_strftime_writes_it() -> None:
    day = datetime(2024, 2, 29)
    forms = [*(f"%{one}" for one in DIRECTIVES), "%d %b %Y", "%%d, 100%%", "%Y-%m-%dT%H:%M"]
    template = "|".join(f"{{{{ strftime_now({form!r}) }}}}" for form in forms)
    assert written(template, date="2024-02-29").split("|") == [day.strftime(form) for form in forms]


def test_a_day_is_that_of_all_calls_in_the_template() -> None:
    assert written(DATED, date="2026-08-01").startswith("Today: 01 Aug 2026\n[system]")
    assert written(DATED, date="2026-08-01", template={"date_string": "never"}).startswith("Today: never\n")
    macro = "{% macro day() %}{{ strftime_now(format='%d') }}{% endmacro %}"
    asked = macro + "{% for m in messages %}{{ day() }}{% endfor %}"
    assert written(asked, date="2026-08-01") == "01" * len(MESSAGES)


def test_who_reads_the_clock_is_known_beforehand() -> None:
    assert reads_clock(tokenizer_with(DATED))
    assert reads_clock(tokenizer_with({"default": CHAT, "tool_use": DATED}))
    assert not reads_clock(tokenizer_with(CHAT + "strftime_now"))
    assert not reads_clock(tokenizer_with(None))
    assert not reads_clock(None)


def test_the_system_s_messages_are_dropped_or_stand_before_the_user_s_first() -> None:
    assert written(CHAT, "drop") == "[user] Hello?\n[assistant] Hi.\n[user] Bye.\n"
    assert written(CHAT, "merge") == "[user] Be brief.\n\nBe kind.\n\nHello?\n[assistant] Hi.\n[user] Bye.\n"


def test_every_template_of_several_has_the_settings_and_the_tokenizer_stays_as_it_was() -> None:
    template = {"default": "{{ x }}", "tool_use": "{{ x }}!"}
    tokenizer = tokenizer_with(template)
    found = settled(tokenizer, ChatConfig(template={"x": 1}))
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert found.apply_chat_template(MESSAGES, tokenize=False) == "1"
    assert found.apply_chat_template(MESSAGES, tools=tools, tokenize=False) == "1!"
    assert tokenizer.chat_template == template
    assert found("a b") == tokenizer("a b")
    assert settled(tokenizer, ChatConfig()) is tokenizer


@pytest.mark.parametrize(
    ("template", "chat", "told"),
    [
        (
            DATED,
            {"template": {"enable_thinkin": False}},
            "sets enable_thinkin, which .* never reads, .* reads date_string",
        ),
        (CHAT, {"template": {"a": 1}}, "it reads no variable"),
        (CHAT, {"template": {"m": 1}}, "never reads"),
        (CHAT, {"template": {"messages": []}}, "sets messages, which every call sets by itself"),
        (CHAT, {"template": {"add_generation_prompt": True}}, "sets add_generation_prompt, which every call"),
        (CHAT, {"template": {"tools": []}}, "sets tools, which every call sets"),
        ("{{ bos_token }}", {"template": {"bos_token": ""}}, "sets bos_token, which every call sets"),
        (DATED, {"template": {"strftime_now": ""}}, r"sets strftime_now, .*\(the day: data.date\)"),
        (CHAT, {"date": "2026-08-01"}, "never asks what day it is"),
        (None, {"template": {"a": 1}}, "has none"),
        (None, {"date": "2026-08-01"}, "has none"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(template: str | None, chat: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settled(tokenizer_with(template), ChatConfig(**chat))


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="no Jinja template"):
        reads_clock(tokenizer_with("{% for %}"))


@pytest.mark.parametrize("day", ["", "today", "2026-8-1", "20260801", "2026-02-30", "01 Aug 2026"])
def test_a_day_that_is_none_is_refused(day: str) -> None:
    with pytest.raises(ConfigError, match="is not a day"):
        ChatConfig(date=day)


@pytest.mark.parametrize("override", ["data.template={think: false}", "data.template.think=false"])
def test_one_spelling_is_that_of_every_stage(override: str) -> None:
    texts = ["data=jsonl", "data.path=chats.jsonl"]
    stages = {
        "distill": texts,
        "datastore": texts,
        "train": ["output_dir=out", "target.path=t", "target_source=live", *texts],
        "decode": ["prompt=a", "chat=true"],
        "eval": ["target.path=t", "drafts.d=d"],
    }
    for stage, given in stages.items():
        config: Any = built(stage, [*given, override])
        assert config.data.template == {"think": False}, stage
