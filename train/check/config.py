"""What a user sets about a check; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.common.typed_config import require, require_at_least
from decode.config import ModelConfig
from train.export.config import Format

FEWEST = 8
"""Tokens of a text by which a draft is measured: a round of four, and places for some of them."""


@dataclass
class ServedDraftConfig:
    """A folder as an engine is given it."""

    path: str | None = None
    """The folder, whoever wrote it."""


@dataclass
class CheckConfig:
    """`python -m train.check`: whether an engine would load a draft's folder as it was trained."""

    draft: ServedDraftConfig = field(default_factory=ServedDraftConfig)
    """The draft."""
    target: ModelConfig = field(default_factory=ModelConfig)
    """The target that the engine serves."""
    format: Format = "vllm"
    """The engine whose reading of names and keys is followed; all is every one that loads such a draft."""
    tokens: int = 96
    """Tokens that the target writes for itself from each prompt, by which the draft is measured, 8 at least; 0 leaves
    that out, and only the target's ends are read."""
    prompts: int = 4
    """Prompts of a few random tokens."""
    seed: int = 0
    """Of those prompts."""

    def __post_init__(self) -> None:
        require(self.draft.path is not None, "draft.path is null; give the folder of a draft")
        require(self.target.path is not None, "target.path is null; give the target that the engine serves")
        require_at_least(0, self, "", "tokens")
        require(self.tokens == 0 or self.tokens >= FEWEST, f"tokens={self.tokens} are too few to draft any behind one; "
                f"give {FEWEST} or more, or 0, which leaves measuring out")  # fmt: skip
        require_at_least(1, self, "", "prompts")
