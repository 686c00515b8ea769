"""What results.json of a report holds, typed: parts are written by the classes that read them back, and defaults stand
for what earlier versions did not write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from eval.results.schema import Energy, Interval, Pair, Row


def _some_fields(given: Row | Mapping[str, Any]) -> Row:
    return given if isinstance(given, Row) else Row.model_construct(**given)


PartOfRow = Annotated[Row, BeforeValidator(_some_fields)]
"""A row of which some fields are known; others may not be asked for."""


class AssistedPeer(BaseModel, frozen=True):
    """transformers assisted generation at a setting."""

    name: str
    draft: str
    temperature: float
    batch_size: int
    version: str
    best: bool
    """False of one that was tried on other prompts."""
    setting: dict[str, Any]
    prompts: str
    tokens_per_s: float | None
    ratio_ours_over_peer: float | None
    ratio_ci95: Interval | None
    seconds_by_prompt: list[Pair | None] | None = None
    """[its seconds per token, ours]."""
    ratio_by_run: list[float | None] = Field(default_factory=list)
    settings_by_run: list[dict[str, Any]] = Field(default_factory=list)
    """Of runs that were pooled, as the ratios are."""


class Unquantised(BaseModel, frozen=True):
    """A draft on the quantised target beside the target as it was before, without a draft."""

    temperature: float
    draft: str
    setting: str | None
    num_draft_tokens: int
    tokens_per_s: float | None
    unquantised_tokens_per_s: float | None
    ratio: float | None
    ratio_ci95: Interval | None
    kl: float
    tv: float
    argmax_agreement: float
    positions: int


class Competitor(BaseModel, frozen=True):
    """What competed for a headline."""

    arm: str
    draft: str
    setting: str | None
    verifier: str
    num_draft_tokens: int
    tokens_per_s: float | None


class Contest(BaseModel, frozen=True):
    """Who competed at a temperature, and who won."""

    temperature: float
    best: str
    prompts: int
    source: str
    rivals: list[Competitor]


class ArmSpeed(BaseModel, frozen=True):
    """Of any arm that was timed."""

    temperature: float
    arm: str
    tokens_per_s: float | None


class LengthSweep(BaseModel, frozen=True):
    """One draft at several lengths."""

    draft: str
    temperature: float
    points: list[PartOfRow]


class Curve(BaseModel, frozen=True):
    """All drafts at several temperatures."""

    num_draft_tokens: int
    points: list[PartOfRow]


class Sweeps(BaseModel, frozen=True):
    """By what is varied."""

    num_draft_tokens: LengthSweep
    temperature: Curve


class Wanted(BaseModel, frozen=True):
    """Numbers of prompts that were asked for; none of a time before that was written."""

    reported: int = 0
    timed: int = 0


class Prompts(BaseModel, frozen=True):
    """What was measured on."""

    sha256: str = ""
    reported: int
    timed: int
    max_new_tokens: int
    rounds: int
    wanted: Wanted = Wanted()


class ReportedTarget(BaseModel, frozen=True):
    """What was decoded."""

    path: str
    fingerprint: str
    num_parameters: int
    dtype: str
    quantization: str | None = None


class Run(BaseModel, frozen=True):
    """One of several that were pooled; published, its rows alone."""

    environment: dict[str, Any]
    rows: list[PartOfRow] = Field(default_factory=list)
    peers: list[AssistedPeer] = Field(default_factory=list)


class Report(BaseModel, frozen=True):
    """The file."""

    name: str
    environment: dict[str, Any]
    target: ReportedTarget
    drafts: dict[str, str]
    fingerprints: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    prompts: Prompts
    headline: list[Contest] = Field(default_factory=list)
    definitions: dict[str, str]
    rows: list[Row]
    energy: list[Energy] | None = None
    peers: list[AssistedPeer]
    unquantised: list[Unquantised] = Field(default_factory=list)
    peers_left_out: str | None
    arms: list[ArmSpeed]
    sweeps: Sweeps
    runs: list[Run] = Field(default_factory=list)

    @property
    def overall(self) -> list[Row]:
        """The rows over all prompts, sampled ones before greedy ones."""
        return sorted((row for row in self.rows if row.category is None), key=lambda row: row.temperature == 0)

    @property
    def contest(self) -> Contest | None:
        """The one behind the headline: at the first temperature above 0."""
        return next((one for one in self.headline if one.temperature > 0), None)
