"""What a user sets about comparisons: of decoders, and what those of families and ways to draft share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from decode.common.typed_config import require, require_at_least, require_some
from decode.sampling.config import SamplingConfig

PLAIN = "plain"
"""The setting of ours that drafts nothing."""

OWN = "own"
"""The kind of text of prompts.file's questions, unless prompts.kinds names others."""


def named_settings(
    changes_by_name: Mapping[str, Mapping[str, Any]], base: SamplingConfig, temperature: float, where: str
) -> dict[str, SamplingConfig]:
    """Name -> settings at one temperature. At 0 every rule is greedy, so those that differ in the rule alone are one.

    ConfigError, naming `where.NAME`, for a key that is no setting and for one that is not exact.
    """
    found: dict[str, SamplingConfig] = {}
    known = {one.name for one in fields(SamplingConfig)} - {"temperature", "max_new_tokens"}
    for name, changes in changes_by_name.items():
        unknown = sorted(set(changes) - known)
        require(not unknown, f"{where}.{name} has unknown keys {unknown}; known are {', '.join(sorted(known))}")
        greedy = {"verifier": "greedy", "replacement": False} if temperature == 0 else {}
        settings = replace(base, **{**changes, "temperature": temperature, **greedy})
        require(
            settings.verifier != "typical",
            f"{where}.{name} is lossy; comparisons are of exact settings alone",
        )
        if settings not in found.values():
            found[name] = settings
    return found


class Batches:
    """Batch sizes of timed cells, and the batches of prompts timed in each."""

    batch_sizes: list[int]
    batches_timed: list[int]

    @property
    def num_timed(self) -> dict[int, int]:
        """Batch size -> batches timed."""
        return dict(zip(self.batch_sizes, self.batches_timed, strict=True))

    def check_batches(self, where: str) -> None:
        """ConfigError unless they go by pairs, each size once."""
        sizes, counts = self.batch_sizes, self.batches_timed
        require(len(set(sizes)) == len(sizes), f"{where}.batch_sizes={sizes} repeats one; each has cells of its own")
        require(
            len(sizes) == len(counts),
            f"{where}.batch_sizes={sizes} and {where}.batches_timed={counts} go by pairs; give as many of each",
        )
        require(
            min([*sizes, *counts], default=1) >= 1,
            f"{where}.batch_sizes={sizes}, batches_timed={counts}; use at least 1",
        )


class ComparisonConfig(Batches):
    """What a user sets about any comparison whose settings are chosen on other prompts than are timed."""

    screening_prompts: int
    choices: str | None

    def batches_screened(self, rows: int) -> int:
        """Batches per kind of text on which settings are chosen at a batch size."""
        return -(-self.screening_prompts // rows)


TextKind = Literal["code", "prose"]


@dataclass
class DecodersConfig(ComparisonConfig):
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
    screening_prompts: int = 1
    """Prompts per kind of text that are at least used for that, so that small batches are more: a choice is to hold."""
    choices: str | None = None
    """results.json of an earlier run, whose choices of settings are taken; null chooses. So several processes time the
    same settings."""
    static_batches: list[int] = field(default_factory=lambda: [1, 4, 8, 16])
    """Batch sizes at which transformers' compiled static cache runs; each compiles for tens of seconds on a CPU."""

    def __post_init__(self) -> None:
        require(bool(self.texts), "decoders.texts is empty; name code, prose or both")
        require_some(self, "decoders.", batch_sizes="[1]", arms="'+decoders.arms.chain4={}'")
        self.check_batches("decoders")
        unknown = sorted(set(self.fixed) - set(self.arms))
        require(not unknown, f"decoders.fixed names {unknown}, and decoders.arms has {sorted(self.arms)}")
        require_at_least(1, self, "decoders.", "screening_batches", "screening_prompts")
        names = sorted({PLAIN} & set(self.arms))
        require(not names, f"decoders.arms names {names}, which is plain decoding; call it otherwise")

    def batches_screened(self, rows: int) -> int:
        """At least `screening_batches`."""
        return max(self.screening_batches, super().batches_screened(rows))


def arm_settings(cfg: DecodersConfig, base: SamplingConfig, temperature: float) -> dict[str, SamplingConfig]:
    """Our settings at one temperature."""
    return named_settings(cfg.arms, base, temperature, "decoders.arms")
