"""The picture of `python -m decode` shows what the terminal showed, in its colours, and fetches nothing."""

import re
import shlex
from html import unescape
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from decode.stage import CYAN, DIM, GREEN, LEGEND, RED, RESET
from tests.tiny import save_tiny_target

ROOT = Path(__file__).resolve().parents[1]
LAST_LINE = "3 tokens in 1 target passes: 3.00 tokens per pass, 99 tokens/s"
NAMES = "  ".join(f"{paint}{name}{RESET}" for name, paint in LEGEND)
TOKENS = f"{GREEN} if a < b &{RESET}{GREEN} c:{RESET}{RED} pass{RESET}{CYAN}\n    x{RESET}"
OUTPUT = f"{NAMES}\n\n{DIM}def f(a):{RESET}{TOKENS}\n\n{LAST_LINE}\n"


@pytest.fixture
def script() -> ModuleType:
    spec = spec_from_file_location("record_decode", ROOT / "scripts" / "record_decode.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def painted(svg: str) -> list[tuple[str, str]]:
    """(colour, text) of every piece of the picture, in order."""
    colours = dict(re.findall(r"\.(decode-r\d+) \{ fill: (#\w+)", svg))
    pieces = re.findall(r'<text class="(decode-r\d+)"[^>]*>([^<]*)</text>', svg)
    return [(colours[name], unescape(text).replace("\xa0", " ")) for name, text in pieces if text.strip()]


def shown(svg: str) -> str:
    return "".join(text for _, text in painted(svg))


def test_tokens_keep_the_colours_of_the_legend(script: ModuleType) -> None:
    found = painted(script.picture(OUTPUT, "python -m decode"))
    green, red, cyan = (next(colour for colour, text in found if text == name) for name, _ in LEGEND)
    dim, plain = (next(colour for colour, text in found if part in text) for part in ("def f", LAST_LINE))
    assert len({green, red, cyan, dim, plain}) == 5
    assert "".join(text for colour, text in found if colour == green) == "accepted if a < b & c:"
    assert [text for colour, text in found if colour == red] == ["correction", " pass"]
    assert [text.strip() for colour, text in found if colour == cyan] == ["bonus", "x"]


def test_the_command_comes_first_and_the_figures_last(script: ModuleType) -> None:
    svg = script.picture(OUTPUT, "python -m decode prompt='a b'")
    assert shown(svg).startswith("$ python -m decode prompt='a b'")
    assert shown(svg).endswith(LAST_LINE)


def test_the_picture_fetches_nothing_and_is_the_same_every_time(script: ModuleType) -> None:
    svg = script.picture(OUTPUT, "python -m decode")
    assert svg == script.picture(OUTPUT, "python -m decode")
    assert "url(" not in svg.replace("url(#", "")
    assert "@font-face" not in svg


@pytest.mark.parametrize("name", ["decode", "edit"])
def test_the_committed_pictures_are_of_their_commands(script: ModuleType, name: str) -> None:
    svg = (script.DOCS / f"{name}.svg").read_text(encoding="utf-8")
    text = shown(svg)
    assert "".join(shlex.join(["python", "-m", "decode", *script.RECORDINGS[name]]).split()) in "".join(text.split())
    assert re.search(r"\d+ tokens in \d+ target passes: [\d.]+ tokens per pass, \d+ tokens/s$", text)
    assert {name for name, _ in LEGEND} <= {text for _, text in painted(svg)}


@pytest.mark.slow
def test_a_command_is_run_and_recorded_and_a_failing_one_leaves_the_picture(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "DOCS", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    target = save_tiny_target(tmp_path / "target")
    arguments = [f"target.path={target}", f"draft.path={target}", "prompt=def", "decode.max_new_tokens=8"]
    assert script.main("decode", arguments) == 0
    before = (tmp_path / "decode.svg").read_text(encoding="utf-8")
    assert "8 tokens in" in shown(before)
    assert script.main("decode", [*arguments, "decode.top_p=2"]) == 2
    assert (tmp_path / "decode.svg").read_text(encoding="utf-8") == before
