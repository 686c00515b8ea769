"""What a user sets about a datastore; imports nothing heavy, so that bad values fail at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.common.typed_config import require, require_at_least
from decode.config import ModelConfig
from distill.corpora.config import DataConfig, check_corpus


@dataclass
class DatastoreConfig:
    """`python -m distill.datastore`: a corpus in the target's tokens, sorted so that any text is found in it."""

    target: ModelConfig = field(default_factory=ModelConfig)
    """Whose tokenizer is used; its weights are not read."""
    data: DataConfig = field(default_factory=DataConfig)
    """The corpus, of which the training split is indexed."""
    tokens: int | None = None
    """Tokens that are indexed at most; None indexes all."""
    output_dir: str = "runs/datastore"
    """New folder, or with resume=auto that of an unfinished build."""
    resume: str = "never"
    """never: refuse an existing output_dir; auto: begin an unfinished build anew, and return when it is finished."""
    plan: bool = False
    """Print what would be read and written, and exit."""

    def __post_init__(self) -> None:
        check_corpus(self.data)
        require_at_least(1, self, "", "tokens")
        require(self.resume in ("never", "auto"), f"resume={self.resume} is neither never nor auto")
