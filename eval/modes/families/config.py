"""What a user sets about the comparison of draft families; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from decode.common.typed_config import require, require_at_least, require_some
from decode.sampling.config import SamplingConfig
from distill.records.config import FeatureCodeName
from eval.comparison_config import Batches, named_settings
from train.export.config import EngineName

SET_BY_MODE = ("output_dir", "target", "records", "steps", "seed", "resume", "plan")
"""Keys of `python -m train` that arms may not set: the comparison decides them."""


@dataclass
class FamiliesConfig(Batches):
    """`mode=families`: which drafts are trained, on what budgets, and how they are measured."""

    arms: dict[str, list[str]] = field(default_factory=lambda: {"lm": ["draft=lm"]})
    """Name -> overrides of `python -m train`, e.g. [draft=lm, draft.layers=1, lr=3e-3]; with records=FOLDER an arm is
    trained on texts, or from kept distributions, of its own."""
    training: list[str] = field(default_factory=list)
    """Overrides of `python -m train` that all arms share."""
    records: str = "runs/toy/records"
    """Finished record folder whose texts are trained on; its target is read again where an arm wants features."""
    folder: str = "runs/families"
    """Folder of the records with features (records_CODE) and of the trainings (ARM-tokens-SEED, ARM-time-SEED)."""
    tokens: int = 60_000
    """Training tokens of every arm in the comparison at equal tokens."""
    seconds: float | None = 20.0
    """Seconds that every arm trains in the comparison at equal time, validation and export not counted; null leaves it
    out."""
    at_once: int = 1
    """Trainings that share the device, each in a process of its own: on a GPU a small draft leaves it idle. `seconds`
    are then those of a shared device."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Seeds of initial weights and data order; every arm is trained with each."""
    feature_codes: list[FeatureCodeName] = field(default_factory=lambda: ["bf16"])
    """How recorded hidden states are coded: all arms train from the first, `feature_arm` from the others too."""
    feature_arm: str | None = None
    """The arm that is trained from every code; None compares no codes."""
    feature_seeds: list[int] = field(default_factory=lambda: [0, 1])
    """Those of `seeds` with which it is; the first code's trainings are there anyway."""
    shapes: dict[str, dict[str, Any]] = field(default_factory=lambda: {"chain": {}, "tree": {"tree": "3x2x1"}})
    """Name -> what it changes in `decode`; tau and losslessness are measured with each at equal tokens, with the first
    elsewhere."""
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8])
    """Prompts decoded at once in the timed run; each is a cell at each temperature. [] times nothing (with
    batches_timed=[]), for arms that differ in tau alone, as those of one family do."""
    batches_timed: list[int] = field(default_factory=lambda: [8, 3])
    """Batches of prompts timed in a cell, by batch size."""
    screening_batches: int = 2
    """Batches from the validation split on which draft lengths are chosen."""
    engine: EngineName | None = None
    """The engine that you serve with: the advice is of drafts that it loads alone. None advises on all, and says which
    engines load each."""

    def __post_init__(self) -> None:
        self._check_arms()
        self._check_lists()
        require(
            self.seconds is None or self.seconds > 0,
            f"families.seconds={self.seconds}; train for some time, or say null for equal tokens alone",
        )
        require_at_least(1, self, "families.", "tokens", "at_once", "screening_batches")

    def _check_arms(self) -> None:
        require_some(self, "families.", arms="'+families.arms.lm=[draft=lm]'")
        for name, overrides in {**self.arms, "": self.training}.items():
            where = f"families.arms.{name}" if name else "families.training"
            keys = [one.lstrip("+~").split("=", 1)[0].split(".")[0] for one in overrides]
            taken = sorted(set(keys) & set(SET_BY_MODE) - ({"records"} if name else set()))
            require(
                not taken,
                f"{where} sets {', '.join(taken)}, which the comparison sets so that arms differ in nothing else. "
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
        for name in ("seeds", "feature_codes", "shapes"):
            require(bool(getattr(self, name)), f"families.{name} is empty; name at least one")
        for name in ("seeds", "feature_codes", "feature_seeds"):
            values = getattr(self, name)
            require(len(set(values)) == len(values), f"families.{name}={values} repeats one; name each once")
        require(
            self.feature_arm is None or (bool(self.feature_seeds) and set(self.feature_seeds) <= set(self.seeds)),
            f"families.feature_seeds={self.feature_seeds} must be some of families.seeds={self.seeds}: codes are "
            "compared seed by seed with the first one",
        )
        self.check_batches("families")


def shape_settings(cfg: FamiliesConfig, base: SamplingConfig, temperature: float) -> dict[str, SamplingConfig]:
    """The shapes' settings at one temperature."""
    return named_settings(cfg.shapes, base, temperature, "families.shapes")
