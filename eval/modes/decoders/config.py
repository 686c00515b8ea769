"""What a user sets about the suite of decoders; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from decode.common.typed_config import require
from decode.config import SamplingConfig
from eval.arms.named_settings import named_settings

TextKind = Literal["code", "prose"]


@dataclass
class DecodersConfig:
    """`mode=decoders`: which settings of ours are tried, and which cells (batch, temperature, text) are timed."""

    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 8, 16])
    """Prompts decoded at once; each is a cell at each temperature and for each kind of text."""
    batches_timed: list[int] = field(default_factory=lambda: [12, 6, 5, 4])
    """Batches of prompts timed in a cell, by batch size."""
    texts: list[TextKind] = field(default_factory=lambda: ["code", "prose"])
    """Kinds of text continued: windows of held-out documents, and docstrings from them (of Python sources)."""
    arms: dict[str, dict[str, Any]] = field(default_factory=lambda: {"chain4": {"num_draft_tokens": 4}})
    """Name -> what this setting of ours changes in `decode`; all are tried on prompts that are not reported."""
    fixed: list[str] = field(default_factory=list)
    """Settings timed besides the best one, whatever the trial says."""
    screening_batches: int = 2
    """Batches per kind of text, from the validation split, on which settings are chosen."""
    static_batches: list[int] = field(default_factory=lambda: [1, 4, 8, 16])
    """Batch sizes at which transformers' compiled static cache runs; each compiles for tens of seconds on a CPU."""

    def __post_init__(self) -> None:
        sizes, counts = self.batch_sizes, self.batches_timed
        require(bool(sizes), "decoders.batch_sizes is empty; name at least one, e.g. decoders.batch_sizes=[1]")
        require(len(set(sizes)) == len(sizes), f"decoders.batch_sizes={sizes} repeats one; each has cells of its own")
        require(
            len(sizes) == len(counts),
            f"decoders.batch_sizes={sizes} and decoders.batches_timed={counts} go by pairs; give as many of each",
        )
        require(min([*sizes, *counts]) >= 1, f"decoders.batch_sizes={sizes}, batches_timed={counts}; use at least 1")
        require(bool(self.texts), "decoders.texts is empty; name code, prose or both")
        require(bool(self.arms), "decoders.arms is empty; name at least one, e.g. '+decoders.arms.chain4={}'")
        unknown = sorted(set(self.fixed) - set(self.arms))
        require(not unknown, f"decoders.fixed names {unknown}, and decoders.arms has {sorted(self.arms)}")
        require(self.screening_batches >= 1, f"decoders.screening_batches={self.screening_batches}; use at least 1")

    @property
    def num_timed(self) -> dict[int, int]:
        """Batch size -> batches timed."""
        return dict(zip(self.batch_sizes, self.batches_timed, strict=True))


def arm_settings(cfg: DecodersConfig, base: SamplingConfig, temperature: float) -> dict[str, SamplingConfig]:
    """Our settings at one temperature."""
    return named_settings(cfg.arms, base, temperature, "decoders.arms")
