"""What is said of every engine: the forms of draft that it loads, in which layout and from which version on, how it is
launched, and why it does not load the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decode.formats.base import Layout
from decode.formats.source import Source

FORMS = ("lm", "eagle3", "peagle", "medusa", "dflash", "dflash2", "lilicorr", "dspark", "mtp", "hydra", "exit_adapter")
"""Of drafts, as engines tell them apart."""
PLAIN = frozenset({"llama", "mistral", "qwen3"})
"""Targets whose embedding goes into the first layer unscaled, and whose hidden states every engine hands over."""
NO_HYDRA = "no engine loads Hydra heads; train draft=eagle3 instead"
NO_EXIT = (
    "no engine drafts with its target's first layers; train draft=eagle3 instead, or decode with draftsmith itself"
)
OWN_MTP_ALONE = (
    "engines load a prediction layer (MTP) as a part of its published target, by that target's own class, and of "
    "such targets format=vllm writes exaone_moe alone; train draft=eagle3 instead"
)
VLLM_ALONE: Mapping[str, Loads | str] = {
    "mtp": OWN_MTP_ALONE,
    "peagle": "of engines here vLLM alone drafts with P-EAGLE heads; use format=vllm, or train draft=eagle3 instead",
    "lilicorr": "LiLiCorr heads are written for vLLM alone; use format=vllm, or train draft=dflash instead",
    "dflash2": "DFlash2 heads are written for vLLM and llama.cpp alone; use format=vllm, or train draft=dflash instead",
    "hydra": NO_HYDRA,
    "exit_adapter": NO_EXIT,
}
"""Forms that no other engine loads, or none."""


@dataclass(frozen=True)
class Launch:
    """What a launch command names."""

    target: str
    draft: Path
    num_draft_tokens: int
    model_impl: str = "auto"
    taps: tuple[int, ...] = ()
    """Hidden states that a head reads (`decode.models.hidden_states`)."""
    is_calibrated: bool = False
    """Temperatures of the chances that it predicts lie in its folder."""
    is_reduced: bool = False
    """It drafts from a reduced vocabulary."""
    is_parallel: bool = False
    """It drafts all tokens of a round in one pass, where the engine can be told to."""


@dataclass(frozen=True)
class NameRules:
    """What an engine makes of the names in a file of weights, as its own loader does; patterns are searched for."""

    renames: tuple[tuple[str, str], ...] = ()
    """(pattern, replacement), applied one after the other."""
    skips: tuple[str, ...] = ()
    """Renamed names that it passes over on purpose, whether they are there or not."""
    shared: tuple[str, ...] = ()
    """Renamed names that it takes from the target where they are missing."""
    unknown: Literal["refused", "skipped"] = "refused"
    """What it does with a name that it does not know; skipped is without a word."""
    missing: Literal["refused", "random"] = "refused"
    """What it does where a tensor is missing; random is without a word."""

    def renamed(self, name: str) -> str:
        """The engine's own name."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def passes_over(self, renamed: str) -> bool:
        """Whether the engine never looks at it."""
        return any(re.search(pattern, renamed) for pattern in self.skips)

    def shares(self, renamed: str) -> bool:
        """Whether the target's own stands in."""
        return any(re.search(pattern, renamed) for pattern in self.shared)


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
    names: NameRules = NameRules()
    """What it makes of the names of tensors."""
    takes_gguf: bool = False
    """It serves a target that is a GGUF file as it is."""
    slides: bool = False
    """It heeds `sliding_window` in a draft model's config.json, in all layers."""
    targets: frozenset[str] | None = None
    """Model types of the targets that it can draft for so, None where any does."""


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
