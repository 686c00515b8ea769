"""What is said of every engine: the forms of draft that it loads, in which layout and from which version on, how it is
launched, and why it does not load the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from train.export.layouts.base import Layout
from train.export.source import Source

FORMS = ("lm", "eagle3", "medusa", "dflash", "dspark", "mtp", "hydra")
"""Of drafts, as engines tell them apart."""
NO_HYDRA = "no engine loads Hydra heads; train draft=eagle3 instead"
OWN_MTP_ALONE = (
    "engines load prediction layers (MTP) as parts of the targets that were published with them, and have no class for "
    "one behind this target; train draft=eagle3 instead"
)


@dataclass(frozen=True)
class Launch:
    """What a launch command names."""

    target: str
    draft: Path
    num_draft_tokens: int
    model_impl: str = "auto"


@dataclass(frozen=True)
class Loads:
    """How an engine loads one form of draft."""

    layout: Layout
    since: str
    """The first version that does, as far as sources of it were read."""
    launch: Callable[[Launch], str]
    """The command, or the lines of a file and the command."""
    refuses: Callable[[Source, str], str | None] = lambda source, model_impl: None
    """Why this very draft cannot be served, and what to do instead; None where it can."""
    tried: str = "checked"
    """run: our tests load it there and compare accepted tokens; checked: by the engine's source alone."""


@dataclass(frozen=True, eq=False)
class Engine:
    """One engine."""

    name: str
    """As `format` calls it."""
    title: str
    """As its makers call it, with the version whose source was read."""
    forms: Mapping[str, Loads | str]
    """By form, how it is loaded, or the reason why it is not and what to do instead; every one of FORMS."""

    def __post_init__(self) -> None:
        assert set(self.forms) == set(FORMS), (self.name, set(FORMS) ^ set(self.forms))
