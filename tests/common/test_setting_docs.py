"""Settings as the help and the reference show them, read from the dataclasses."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from decode.common.setting_docs import Setting, setting_docs
from tests.bad_configurations import leaves
from tests.commands import STAGES, config_class


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
