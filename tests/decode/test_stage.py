"""`python -m decode`: what a person sees on the terminal, and what bad input says."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from decode.config import DecodeConfig, DrafterConfig, ModelConfig, SamplingConfig
from decode.house.errors import ConfigError, InputError
from decode.loop import Event
from decode.stage import run
from decode.stats import Round, Stats
from decode.terminal import CYAN, GREEN, RED, RESET, Painter
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


def test_a_completion_is_printed_and_kept(config: DecodeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run(config)
    printed = capsys.readouterr().out
    assert printed.startswith("def main():")
    assert "tokens per pass" in printed
    assert (Path(config.output_dir or "") / "completion.json").is_file()
    with pytest.raises(ConfigError, match="resume"):
        run(config)


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
    config.draft.path = "absent/draft"
    with pytest.raises(InputError, match="absent/draft"):
        run(config)
    with pytest.raises(ConfigError, match="exactly one"):
        DecodeConfig()
