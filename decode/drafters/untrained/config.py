"""Settings of drafters that are named, not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.common.typed_config import build, require


@dataclass
class NgramConfig:
    """`ngram`: prompt lookup."""

    least_match: int = 2
    """Fewest tokens at the end of the text that must occur earlier for anything to be drafted."""
    memory: int = 0
    """Tokens of ended requests of this process that are searched besides (up to twice as many); 0 searches none."""

    def __post_init__(self) -> None:
        require(self.least_match >= 1, f"least_match={self.least_match}; a match has at least 1 token")
        require(self.memory >= 0, f"memory={self.memory} is negative; 0 searches no earlier requests")


@dataclass
class EditConfig:
    """`edit`: the text that is being edited."""

    source: str | None = None
    """Text file that is edited, the same for all requests; null: each request's own prompt."""

    def __post_init__(self) -> None:
        if self.source is not None:
            require(Path(self.source).is_file(), f"source={self.source} does not exist; give the file that is edited")
            require(Path(self.source).stat().st_size > 0, f"source={self.source} is empty: nothing in it can be edited")


UNTRAINED = {"ngram": NgramConfig, "edit": EditConfig}
"""Name, in place of a folder -> its settings."""


def settings_of(name: str | None, given: Mapping[str, Any], where: str = "draft.settings") -> Any:
    """The settings of the drafter of this name; ConfigError for unknown ones, and for any of a draft that is loaded."""
    if name in UNTRAINED:
        return build(UNTRAINED[name], given, where)
    require(
        not given,
        f"{where}={dict(given)} are settings of a drafter without weights ({', '.join(UNTRAINED)}), and the draft is "
        f"{name}. Leave them out",
    )
    return None
