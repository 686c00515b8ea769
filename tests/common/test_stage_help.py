"""`--help` of the four stages and the reference of settings: what they show is what the stage accepts."""

import re
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest

from decode.common.compose import CONF, groups
from decode.common.errors import ConfigError
from decode.common.setting_docs import Setting, setting_docs
from decode.common.stage_help import WIDTH, choices, help_text
from tests.bad_configurations import leaves
from tests.commands import MINIMUM, MODULES, ROOT, STAGES, built, config_class, main_of


def shown(stage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", [f"draftsmith-{stage}", *arguments])
    with pytest.raises(SystemExit) as ended:
        main_of(stage)()
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("stage", STAGES)
def test_help_is_a_screen_with_examples_groups_settings_and_where_to_read_on(stage: str, capsys, monkeypatch) -> None:
    text = shown(stage, capsys, monkeypatch, "--help")
    assert text == shown(stage, capsys, monkeypatch, "-h", "seed=3")
    assert "Powered by Hydra" not in text
    assert len(re.findall(rf"^  .*-m {MODULES[stage]} .*=", text, flags=re.MULTILINE)) >= 3
    for group in groups(stage):
        assert re.search(rf"^  {group} +\w", text, flags=re.MULTILINE), group
    for one in setting_docs(config_class(stage)):
        if "." not in one.key and one.key not in groups(stage):
            assert re.search(rf"^  {one.key}(\.\*)? ", text, flags=re.MULTILINE), one.key
    for document in re.findall(r"\S+\.md", text.split("Read on:")[1]):
        assert (ROOT / document).is_file()
    commands = [line for line in text.splitlines() if f"-m {MODULES[stage]} " in line]
    assert not [line for line in text.splitlines() if len(line) > WIDTH and line not in commands]
    assert len(text.splitlines()) < 80


def test_help_of_training_tells_the_families_apart(capsys, monkeypatch) -> None:
    text = shown("train", capsys, monkeypatch, "--help")
    for family in ("lm", "medusa", "hydra", "eagle3", "mtp", "peagle", "dspark"):
        assert re.search(rf"^  {family} +[A-Z].{{20}}", text, flags=re.MULTILINE), family


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_choice_is_shown_where_the_stage_accepts_it_and_nowhere_else(stage: str) -> None:
    settings = setting_docs(config_class(stage))
    for group, default in groups(stage).items():
        listed = choices(stage, group, settings)
        accepted = {path.stem for path in (CONF / group).glob("*.yaml") if accepts_choice(stage, group, path.stem)}
        assert set(listed) - {"null"} == accepted, group
        assert next(iter(listed)) == (default or "null")
        assert all(len(text) > 10 for text in listed.values()), listed


def accepts_choice(stage: str, group: str, name: str) -> bool:
    """Whether all that it sets is known, be it that other settings must go along."""
    try:
        built(stage, [*MINIMUM[stage], f"{group}={name}"])
    except ConfigError as error:
        return "unknown key" not in str(error) and "Could not override" not in str(error)
    return True


def test_a_group_and_a_section_are_explained_whole(capsys, monkeypatch) -> None:
    text = shown("train", capsys, monkeypatch, "--help", "draft", "tokenizer")
    assert re.search(r"^  eagle3 +EAGLE-3", text, flags=re.MULTILINE)
    assert re.search(r"^  draft\.head\.depth +Draft tokens of a round", text, flags=re.MULTILINE)
    assert "tokenizer.train_entries" in text
    assert "validate_every" not in text
    assert re.search(r"\(int \| null = null\)", text)


def test_help_about_nothing_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"--help drft: nothing is called so. Ask for one of target, .*tokenizer"):
        help_text("train", config_class("train"), ["drft"])


def test_hydras_flags_stay_within_reach(capsys, monkeypatch) -> None:
    assert "--shell-completion" in shown("train", capsys, monkeypatch, "--hydra-help")


def test_ranks_show_the_help_once(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert shown("train", capsys, monkeypatch, "--help") == ""


def test_examples_are_commands_that_are_tested() -> None:
    """tests/test_conf.py reads them from the head of the stage's file; the help shows every line of them."""
    for stage in STAGES:
        head = [line for line in (CONF / f"{stage}.yaml").read_text().splitlines() if line.startswith("#   ")]
        text = help_text(stage, config_class(stage), [])
        assert head
        assert all(line.removeprefix("#   ") in text for line in head)


@dataclass
class Inner:
    """A docstring of the class, which is no setting's."""

    rate: float = 0.5
    """Share of
    something."""
    kinds: list[Literal["a", "b"]] = field(default_factory=lambda: ["a"])
    """Some."""


@dataclass
class Outer:
    output_dir: str
    """Where."""
    pair: tuple[float, ...] = (0.9, 1)
    "Two."
    name: str = ""
    inner: Inner | None = None
    """A section."""
    mode: Literal["x", "y"] | None = None
    """None is neither."""


def test_kinds_defaults_and_texts_are_those_of_the_source() -> None:
    assert setting_docs(Outer) == [
        Setting("output_dir", "str", "required", "Where."),
        Setting("pair", "tuple[float, ...]", "[0.9, 1]", "Two."),
        Setting("name", "str", '""', ""),
        Setting("inner", "", "", "A section."),
        Setting("inner.rate", "float", "0.5", "Share of something."),
        Setting("inner.kinds", "list[a | b]", '["a"]', "Some."),
        Setting("mode", "x | y | null", "null", "null is neither."),
    ]


@dataclass
class Narrower(Inner):
    more: int = 1
    """What the others lack."""


def test_a_setting_that_is_inherited_says_what_it_is() -> None:
    assert [one.text for one in setting_docs(Narrower)] == ["Share of something.", "Some.", "What the others lack."]


@pytest.mark.parametrize("stage", STAGES)
def test_every_setting_of_every_stage_says_what_it_is(stage: str) -> None:
    found = setting_docs(config_class(stage))
    assert [one.key for one in found if one.kind] == [key for key, _ in leaves(config_class(stage))]
    assert not [one.key for one in found if not one.text.endswith(".")]
