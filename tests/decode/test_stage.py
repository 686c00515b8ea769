"""`python -m decode`: what a person sees on the terminal, and what bad input says."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode import generate, load_drafter, warm_up
from decode.common.errors import ConfigError, InputError
from decode.config import ChatConfig, DecodeConfig, DrafterConfig, ModelConfig, SamplingConfig
from decode.forward import runner
from decode.models.compatibility import load_tokenizer
from decode.models.load import load_model
from decode.requests import Event
from decode.stage import CYAN, GREEN, RED, RESET, Painter, encode_prompt, run
from decode.stats import Round, Stats
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
