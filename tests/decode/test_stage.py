"""`python -m decode`: what a person sees on the terminal, what a chat template's settings change, and bad input."""

from __future__ import annotations

import io
import json
from copy import copy
from dataclasses import replace
from datetime import date, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode import generate, load_drafter, warm_up
from decode.common.errors import ConfigError, InputError
from decode.config import ChatConfig, DecodeConfig, DrafterConfig, ModelConfig
from decode.forward import runner
from decode.models.chat_template import DIRECTIVES, reads_clock, settled
from decode.models.compatibility import load_tokenizer
from decode.models.load import load_model
from decode.requests import Event
from decode.sampling.config import SamplingConfig
from decode.stage import CYAN, GREEN, RED, RESET, Painter, encode_prompt, run
from decode.stats import Round, Stats
from tests.commands import built
from tests.tiny import save_tiny_target, tiny_tokenizer


@pytest.fixture
def config(tmp_path: Path) -> DecodeConfig:
    target = save_tiny_target(tmp_path / "target")
    draft = save_tiny_target(tmp_path / "draft", num_layers=1, seed=2)
    return DecodeConfig(
        target=ModelConfig(path=str(target)),
        draft=DrafterConfig(path=str(draft)),
        decode=SamplingConfig(max_new_tokens=12),
        prompt="def main():",
        output_dir=str(tmp_path / "out"),
        color="never",
    )


def test_a_completion_is_printed_and_kept(
    config: DecodeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "CAPTURE_AFTER", 10**9)  # captures would cost more than the passes do
    run(config)
    printed = capsys.readouterr().out
    assert printed.startswith("def main():")
    assert "tokens per pass" in printed
    assert (Path(config.output_dir or "") / "completion.json").is_file()
    with pytest.raises(ConfigError, match="resume"):
        run(config)


def test_passes_are_captured_before_the_completion_which_is_the_same(
    config: DecodeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first completion of the toy'showed a third of the decoder's speed."""
    config.decode.max_new_tokens, config.decode.num_draft_tokens = 24, 2
    captured: list[str] = []
    calls: list[int] = []
    original = runner.capture

    def noted(*given: object) -> object:
        captured.append(type(given[0]).__name__)
        return original(*given)  # type: ignore[arg-type]

    def counting(function: Any) -> Any:
        def call(*given: object, **named: object) -> object:
            before = len(captured)
            try:
                return function(*given, **named)
            finally:
                calls.append(len(captured) - before)

        return call

    monkeypatch.setattr(runner, "capture", noted)
    monkeypatch.setattr("decode.stage.warm_up", counting(warm_up))
    monkeypatch.setattr("decode.stage.generate", counting(generate))
    run(config)
    warming, completing = calls
    assert warming >= 1  # a round of both
    assert completing == 0
    printed = capsys.readouterr()
    assert "warming up" in printed.err
    assert printed.out.count("def main():") == 1
    model = load_model(config.target)
    drafter = load_drafter(config.draft.path or "", model)
    tokenizer = load_tokenizer(config.target)
    ids = torch.tensor([tokenizer("def main():")["input_ids"]])
    alone = generate(model, drafter, ids, tokenizer=tokenizer, seed=config.seed, **vars(config.decode))
    kept = json.loads((Path(config.output_dir or "") / "completion.json").read_text())
    assert kept["tokens"] == alone.sequences[0].tolist()
    assert f"{alone.stats.num_tokens} tokens in {alone.stats.num_target_passes} target passes" in printed.out


def test_tokens_are_painted_by_their_fate() -> None:
    tokenizer = tiny_tokenizer()
    a, b, c, d = (tokenizer.encode(letter)[0] for letter in "abcd")
    stream = io.StringIO()
    painter = Painter(tokenizer, stream, "always")
    painter.event(Event(0, [a, b], accepted=1, drafted=2))
    painter.event(Event(0, [c, d], accepted=1, drafted=1))
    want = f"{GREEN}a{RESET}{RED}b{RESET}{GREEN}c{RESET}{CYAN}d{RESET}"
    assert stream.getvalue() == want


def test_a_character_split_over_tokens_is_written_once_whole() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode("é")
    assert len(tokens) == 2
    stream = io.StringIO()
    painter = Painter(tokenizer, stream, "never")
    painter.event(Event(0, tokens[:1], 0, 0))
    assert stream.getvalue() == ""
    painter.event(Event(0, tokens[1:], 0, 0))
    assert stream.getvalue() == "é"


def test_words_stay_apart_where_the_decoder_drops_a_leading_space() -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("▁cat", -1.0), ("s", -2.0)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    tokenizer.decoder = decoders.Metaspace()  # type: ignore[assignment]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids = wrapped.encode("the cats the cat")
    stream = io.StringIO()
    painter = Painter(wrapped, stream, "never")
    painter.prompt(ids[:1])
    painter.event(Event(0, ids[1:], 1, 3))
    assert stream.getvalue() == "the cats the cat"


def test_half_a_character_at_the_end_is_shown() -> None:
    tokenizer = tiny_tokenizer()
    stream = io.StringIO()
    painter = Painter(tokenizer, stream, "never")
    painter.event(Event(0, tokenizer.encode("ab") + tokenizer.encode("é")[:1], 0, 0))
    painter.end(Stats(2))
    assert stream.getvalue().startswith("ab�\n")


def test_the_closing_line_gives_tokens_per_pass() -> None:
    stream = io.StringIO()
    Painter(tiny_tokenizer(), stream, "never").end(Stats(2, rounds=[Round(0, 2, 2, 3), Round(0, 2, 0, 1)]))
    assert "4 tokens in 2 target passes: 2.00 tokens per pass" in stream.getvalue()


def test_bad_input_is_refused_before_weights_are_loaded(config: DecodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("decode.stage.load_model", never)
    config.decode.max_new_tokens = 250
    with pytest.raises(InputError, match="context is 256"):
        run(config)
    config.prompt, config.prompt_file = None, "absent.txt"
    with pytest.raises(InputError, match="absent.txt does not exist"):
        run(config)
    file = Path(config.target.path or "") / "latin.txt"
    file.write_bytes(b"caf\xe9")
    config.prompt_file = str(file)
    with pytest.raises(InputError, match="not UTF-8"):
        run(config)
    config.draft.path = "absent/draft"
    with pytest.raises(InputError, match="absent/draft"):
        run(config)
    with pytest.raises(ConfigError, match="exactly one"):
        DecodeConfig()
    with pytest.raises(ConfigError, match="empty text"):
        DecodeConfig(prompt="a", stop_strings=[""])


def test_a_device_or_a_size_that_is_none_is_refused(config: DecodeConfig) -> None:
    config.target.device = "foo"
    with pytest.raises(InputError, match="device=foo"):
        run(config)
    file = Path(config.target.path or "") / "config.json"
    file.write_text(file.read_text().replace('"hidden_size": 32', '"hidden_size": "abc"'))
    with pytest.raises(InputError, match="hidden_size"):
        run(config)


def test_a_prompt_in_a_chat_is_written_by_the_settings_of_chats(
    config: DecodeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "CAPTURE_AFTER", 10**9)
    tokenizer = tiny_tokenizer()
    words = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.chat_template = "{{ strftime_now('%d %b') }}: " + words + "{{ think }}"
    tokenizer.save_pretrained(str(config.target.path))
    chat = replace(config, chat=True, data=ChatConfig(template={"think": False}, date="2026-02-03"))
    run(chat)
    assert capsys.readouterr().out.startswith("03 Feb: def main():False")
    today = replace(chat, data=ChatConfig(template={"think": True}), output_dir=None)
    run(today)
    assert capsys.readouterr().out.startswith(f"{date.today():%d %b}: def main():True")
    with pytest.raises(ConfigError, match="sets thinks, which the chat template .* never reads.* it reads think"):
        run(replace(chat, data=ChatConfig(template={"thinks": True})))
    with pytest.raises(ConfigError, match="chat=false; set chat=true"):
        replace(chat, chat=False)
    for refusal in ("raise_exception('the system speaks first')", "nobody.said", "1 / 0", "messages + 1"):
        tokenizer.chat_template = f"{{{{ {refusal} }}}}"
        with pytest.raises(InputError, match=r"refuses the prompt as what a user says \(.*drop chat=true"):
            encode_prompt(chat, tokenizer)


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
