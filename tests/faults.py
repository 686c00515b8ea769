"""One-line faults, put into the code one at a time: the test named beside each must notice it.

`FAULTS` of `tests/FOLDER/test_faults.py` are those of one folder. That the tests pass without a fault is what they say
themselves.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

import pytest


@dataclass(frozen=True)
class Fault:
    """`old` stands once in the source of `where`, and `new` in its place is wrong."""

    where: str
    """"train.optimizers:build", "train.training_loop:Loop.step", or a constant, whose `old` and `new` are literals."""
    old: str
    new: str
    caught_by: Callable[..., object]
    """A test, or a `functools.partial` of a parametrized one; the fixtures it names are handed to it."""

    def __str__(self) -> str:
        return f"{self.where} {self.new}"

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        """Into the function itself, so that it is met under whatever name it was imported."""
        holder, name = _holder(self.where)
        function = _function(inspect.getattr_static(holder, name))
        if function is None:
            assert getattr(holder, name) == ast.literal_eval(self.old), (self.where, getattr(holder, name))
            patch.setattr(holder, name, ast.literal_eval(self.new))
        else:
            patch.setattr(function, "__code__", _code(function, self.old, self.new))


def noticed_by(test: Callable[..., object], *faults: tuple[str, str, str]) -> list[Fault]:
    """The faults (where, old, new) that this one test must notice."""
    return [Fault(*fault, test) for fault in faults]


def check_caught(fault: Fault, request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> None:
    """Fail unless the fault's test does. Fixtures are made before the fault is put in, so that it cannot outlast it."""
    parameters = inspect.signature(fault.caught_by).parameters.values()
    wanted = [one.name for one in parameters if one.default is inspect.Parameter.empty]
    fixtures = {name: request.getfixturevalue(name) for name in wanted}
    fault.put_in(patch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        fault.caught_by(**fixtures)


def _holder(where: str) -> tuple[Any, str]:
    module, path = where.split(":")
    *parents, name = path.split(".")
    return functools.reduce(getattr, parents, import_module(module)), name


def _function(found: Any) -> FunctionType | None:
    """The function behind properties, class methods and decorators that keep what they wrap."""
    for attribute in ("fget", "func", "__func__"):
        found = getattr(found, attribute, None) or found
    found = inspect.unwrap(found) if callable(found) else found
    return found if isinstance(found, FunctionType) else None


def _code(function: FunctionType, old: str, new: str) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {function.__qualname__}:\n{source}"
    source = source.replace(old, new)
    if "__class__" in function.__code__.co_freevars:  # what super() without arguments looks at
        source = "class Holder:\n" + textwrap.indent(source, "    ")
    code = _named(compile(source, inspect.getfile(function), "exec"), function.__name__)
    assert code.co_freevars == function.__code__.co_freevars, (code.co_freevars, function.__code__.co_freevars)
    return code


def _named(outer: CodeType, name: str) -> CodeType:
    inner = [one for one in outer.co_consts if isinstance(one, CodeType)]
    found = [one for one in inner if one.co_name == name] or [_named(one, name) for one in inner]
    return found[0]
