"""Dataclasses built from containers: what is accepted, and what each refusal says."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from decode.common.errors import ConfigError
from decode.common.typed_config import build, field_kind, require


@dataclass
class Inner:
    rate: float = 0.5
    kind: Literal["a", "bb", 3] = "a"

    def __post_init__(self) -> None:
        require(self.rate < 3, f"inner.rate = {self.rate} is too much.")
        require(self.rate <= 1, f"rate = {self.rate} must be at most 1.")


@dataclass
class Outer:
    path: str | None = None
    steps: int = 1
    flag: bool = False
    inner: Inner = field(default_factory=Inner)
    spare: Inner | None = None
    names: list[str] = field(default_factory=list)
    pair: tuple[int, float] = (0, 0.0)
    rates: tuple[float, ...] = ()
    table: dict[str, int] = field(default_factory=dict)
    either: int | str = 0


@dataclass
class Needy:
    path: str


def test_every_supported_type_is_built() -> None:
    built = build(
        Outer,
        {
            "path": "x",
            "steps": 3,
            "flag": True,
            "inner": {"rate": "1e-3", "kind": 3},
            "spare": {"rate": 1},
            "names": ["a"],
            "pair": [1, 2],
            "rates": [1, "2.5"],
            "table": {"a": 1},
            "either": "text",
        },
    )
    assert built == Outer("x", 3, True, Inner(0.001, 3), Inner(1.0), ["a"], (1, 2.0), (1.0, 2.5), {"a": 1}, "text")
    assert isinstance(built.pair[1], float)
    assert isinstance(built.spare, Inner)


def test_left_out_keys_take_their_defaults() -> None:
    assert build(Outer, {}) == Outer()
    assert build(Outer, {"path": None, "spare": None}) == Outer()


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ({"stepz": 1}, ["'stepz'", "'steps'", "either"]),
        ({"inner": {"rat": 1}}, ["'inner.rat'", "'inner.rate'", "kind"]),
        ({"spare": {"rat": 1}}, ["'spare.rat'"]),
        ({1: 2}, ["'1'"]),
        ({"steps": True}, ["steps = True", "int", "bool"]),
        ({"steps": 1.5}, ["steps = 1.5", "int", "float"]),
        ({"steps": "3"}, ["steps = '3'", "int", "str"]),
        ({"steps": None}, ["steps = None", "int"]),
        ({"flag": 1}, ["flag = 1", "bool", "int"]),
        ({"path": 3}, ["path = 3", "Quote it"]),
        ({"inner": None}, ["inner = None"]),
        ({"inner": 3}, ["inner = 3", "mapping"]),
        ({"inner": {"rate": "fast"}}, ["inner.rate = 'fast'", "finite number"]),
        ({"inner": {"rate": float("nan")}}, ["inner.rate = nan"]),
        ({"inner": {"rate": True}}, ["inner.rate = True"]),
        ({"inner": {"kind": "b"}}, ["inner.kind = 'b'", "'a', 'bb', 3"]),
        ({"inner": {"kind": 3.0}}, ["inner.kind = 3.0"]),
        ({"inner": {"rate": 3, "kind": "bb"}}, ["inner.rate = 3.0 is too much"]),
        ({"inner": {"rate": 2}}, ["inner: rate = 2.0 must be at most 1"]),
        ({"names": "abc"}, ["names = 'abc'", "list"]),
        ({"names": ["a", 1]}, ["names[1] = 1"]),
        ({"pair": [1]}, ["pair = [1]", "2 entries", "has 1"]),
        ({"table": {"a": "x"}}, ["table.a = 'x'"]),
        ({"table": [1]}, ["table = [1]", "dict"]),
        ({"either": 1.5}, ["either = 1.5"]),
    ],
)
def test_a_bad_value_is_named_with_its_place_and_the_remedy(container: dict, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Outer, container)
    assert all(part in str(caught.value) for part in said), str(caught.value)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="missing path"):
        build(Needy, {})


def test_accepts_follows_nested_and_optional_dataclasses() -> None:
    assert field_kind(Outer, "spare.rate") is not None
    assert field_kind(Outer, "inner.kind") is not None
    assert field_kind(Outer, "table.anything") is not None
    assert field_kind(Outer, "inner.other") is None
    assert field_kind(Outer, "steps.rate") is None
    assert field_kind(Outer, "nothing.rate") is None
