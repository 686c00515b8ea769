"""What a user sets about the suite of families; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from decode.common.typed_config import require
from decode.config import SamplingConfig
from eval.arms.named_settings import named_settings

FeatureCode = Literal["bf16", "int8", "pca"]
SET_BY_SUITE = ("output_dir", "target", "records", "steps", "seed", "resume", "plan")
"""Keys of `python -m train` that arms may not set: the comparison decides them."""


@dataclass
class FamiliesConfig:
    """`mode=families`: which drafts are trained, on what budgets, and how they are measured."""

    arms: dict[str, list[str]] = field(default_factory=lambda: {"lm": ["draft=lm"]})
    """Name -> overrides of `python -m train`, e.g. [draft=lm, draft.layers=1, lr=3e-3]."""
    training: list[str] = field(default_factory=list)
    """Overrides of `python -m train` that all arms share."""
    records: str = "runs/quickstart/records"
    """Finished record folder whose texts are trained on; its target is read again where an arm wants features."""
    folder: str = "runs/families"
    """Folder of the records with features (records_CODE) and of the trainings (ARM-tokens-SEED, ARM-time-SEED)."""
    tokens: int = 60_000
    """Training tokens of every arm in the comparison at equal tokens."""
    seconds: float = 20.0
    """Training time of every arm in the comparison at equal time, validation and export not counted."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Seeds of initial weights and data order; every arm is trained with each."""
    feature_codes: list[FeatureCode] = field(default_factory=lambda: ["bf16"])
    """How recorded hidden states are coded: all arms train from the first, `feature_arm` from the others too."""
    feature_arm: str | None = None
    """The arm that is trained from every code; None compares no codes."""
    feature_seeds: list[int] = field(default_factory=lambda: [0, 1])
    """Those of `seeds` with which it is; the first code's trainings are there anyway."""
    shapes: dict[str, dict[str, Any]] = field(default_factory=lambda: {"chain": {}, "tree": {"tree": "3x2x1"}})
    """Name -> what it changes in `decode`; tau and losslessness are measured with each at equal tokens, with the first
    elsewhere."""
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8])
    """Prompts decoded at once in the timed run; each is a cell at each temperature."""
    batches_timed: list[int] = field(default_factory=lambda: [8, 3])
    """Batches of prompts timed in a cell, by batch size."""
    screening_batches: int = 2
    """Batches from the validation split on which draft lengths are chosen."""

    def __post_init__(self) -> None:
        self._check_arms()
        self._check_lists()
        require(self.tokens >= 1, f"families.tokens={self.tokens}; train on at least 1 token")
        require(self.seconds > 0, f"families.seconds={self.seconds}; train for some time")
        require(self.screening_batches >= 1, f"families.screening_batches={self.screening_batches}; use at least 1")

    def _check_arms(self) -> None:
        require(bool(self.arms), "families.arms is empty; name at least one, e.g. '+families.arms.lm=[draft=lm]'")
        for name, overrides in {**self.arms, "": self.training}.items():
            where = f"families.arms.{name}" if name else "families.training"
            keys = [one.lstrip("+~").split("=", 1)[0].split(".")[0] for one in overrides]
            taken = sorted(set(keys) & set(SET_BY_SUITE))
            require(
                not taken,
                f"{where} sets {', '.join(taken)}, which the suite sets itself so that arms differ in nothing else. "
                "Leave it out; see families.tokens, families.seconds and families.seeds",
            )
        require(
            not any("/" in name or name.startswith(".") for name in self.arms),
            f"families.arms={list(self.arms)}: names are parts of folder names; leave out slashes and leading dots",
        )
        require(
            self.feature_arm is None or self.feature_arm in self.arms,
            f"families.feature_arm={self.feature_arm} is none of families.arms, {', '.join(self.arms)}",
        )

    def _check_lists(self) -> None:
        for name in ("seeds", "feature_codes", "shapes", "batch_sizes", "batches_timed"):
            require(bool(getattr(self, name)), f"families.{name} is empty; name at least one")
        for name in ("seeds", "feature_codes", "feature_seeds", "batch_sizes"):
            values = getattr(self, name)
            require(len(set(values)) == len(values), f"families.{name}={values} repeats one; name each once")
        require(
            self.feature_arm is None or (bool(self.feature_seeds) and set(self.feature_seeds) <= set(self.seeds)),
            f"families.feature_seeds={self.feature_seeds} must be some of families.seeds={self.seeds}: codes are "
            "compared seed by seed with the first one",
        )
        sizes, counts = self.batch_sizes, self.batches_timed
        require(
            len(sizes) == len(counts),
            f"families.batch_sizes={sizes} and families.batches_timed={counts} go by pairs; give as many of each",
        )
        require(min([*sizes, *counts]) >= 1, f"families.batch_sizes={sizes}, batches_timed={counts}; use at least 1")

    @property
    def num_timed(self) -> dict[int, int]:
        """Batch size -> batches timed."""
        return dict(zip(self.batch_sizes, self.batches_timed, strict=True))


def shape_settings(cfg: FamiliesConfig, base: SamplingConfig, temperature: float) -> dict[str, SamplingConfig]:
    """The shapes' settings at one temperature."""
    return named_settings(cfg.shapes, base, temperature, "families.shapes")
