"""What a user sets about an export; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from decode.common.typed_config import require, require_at_least
from decode.config import ModelConfig, Precision, model_folder

EngineName = Literal["vllm", "sglang", "trtllm", "tgi", "llamacpp", "speculators", "transformers"]
Format = Literal[EngineName, "all"]


@dataclass
class SavedDraftConfig:
    """A draft that was trained here."""

    path: str | None = None
    """Its folder, or that of the run that trained it."""

    def __post_init__(self) -> None:
        self.path = None if self.path is None else model_folder(self.path)


@dataclass
class ExportConfig:
    """`python -m train.export`: a trained draft as a folder that an engine loads."""

    format: Format
    """The engine to write for; all writes a folder in `output_dir` for each form that some engine loads."""
    output_dir: str
    """The folder to write, which must not exist."""
    draft: SavedDraftConfig = field(default_factory=SavedDraftConfig)
    """The draft."""
    target: ModelConfig = field(default_factory=ModelConfig)
    """The target that the engine will serve; `target.path` null is the one that the draft was trained on."""
    dtype: Precision = "auto"
    """Precision to write weights in; auto is the one that the draft was saved in."""
    num_draft_tokens: int | None = None
    """Draft tokens of a round (k) that launch commands ask for; None is what the draft was trained for."""
    model_impl: Literal["auto", "transformers"] = "auto"
    """vLLM: how it runs the target; transformers is what gemma3 targets of EAGLE-3 need."""

    def __post_init__(self) -> None:
        require(self.draft.path is not None, "draft.path is null; give the folder of a draft, or of the run's")
        require_at_least(1, self, "", "num_draft_tokens")
