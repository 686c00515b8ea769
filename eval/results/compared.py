"""What results.json of comparisons holds, typed, and how those of all modes begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, model_validator

from eval.results.schema import Interval, Row

RATIOS = ("over_transformers", "over_autoregressive", "over_assisted", "over_vllm", "over_plain")


class Heading(BaseModel, frozen=True):
    """How every file begins."""

    schema_version: int = Field(2, alias="schema")
    name: str
    mode: str
    environment: dict[str, Any]
    target: dict[str, Any]

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.environment["seed"]


class Place(BaseModel, frozen=True):
    """Where something was measured or chosen."""

    batch_size: int
    temperature: float
    text: str | None = None
    """None where it is of all texts."""

    @property
    def point(self) -> tuple[int, float]:
        """Without the text."""
        return self.batch_size, self.temperature

    @property
    def place(self) -> Place:
        """Alone."""
        return Place(batch_size=self.batch_size, temperature=self.temperature, text=self.text)


class Ratio(BaseModel, frozen=True):
    """How many times as fast as another."""

    value: float | None = None
    ci95: Interval | None = None
    by_run: list[float | None] = Field(default_factory=list)
    """Of runs that were pooled."""

    @property
    def ends(self) -> tuple[float, float]:
        """Of its interval; twice itself without one."""
        value = float("nan") if self.value is None else self.value
        return (value, value) if self.ci95 is None else (self.ci95[0], self.ci95[1])


class TimedArm(BaseModel, frozen=True):
    """An arm of a cell."""

    arm: str
    tokens_per_s: float | None
    ratios: dict[str, Ratio]
    """By what it is held against, see `RATIOS`."""

    @model_validator(mode="before")
    @classmethod
    def _with_ratios(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        found = {
            name: {"value": given[name], "ci95": given.get(f"{name}_ci95"), "by_run": given.get(f"{name}_by_run", [])}
            for name in RATIOS
            if name in given
        }
        return {**given, "ratios": found}

    def over(self, other: str) -> Ratio:
        """Nothing where the other did not run."""
        return self.ratios.get(other, Ratio())


class TimedCell(Place, frozen=True):
    """An interleaved run of all arms on one text."""

    text: str = ""
    prompts: int
    arms: list[TimedArm]
    left_out: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, str] = Field(default_factory=dict)
    """Arm -> its setting."""

    def arm(self, name: str) -> TimedArm | None:
        """None where it did not run."""
        return next((one for one in self.arms if one.arm == name), None)

    def over(self, name: str, other: str) -> float:
        """How many times as fast an arm is; not a number where that is not known."""
        arm = self.arm(name)
        value = None if arm is None else arm.over(other).value
        return float("nan") if value is None else value


class Held(BaseModel, frozen=True):
    """How sure a choice is."""

    share: float
    loss: float


class Choice(Place, frozen=True):
    """Settings that were tried and chosen; arm or family -> setting."""

    best: dict[str, str]
    tokens_per_s: dict[str, dict[str, float | None]]
    prompts: int
    seconds: float
    held: Held | None = None
    best_chain: str | None = None
    """The fastest plain chain of ours, where these are told apart."""


class Peer(Place, frozen=True):
    """An arm that is not ours, beside our best setting."""

    name: str
    version: str | None
    tokens_per_s: float | None
    ratio_ours_over_peer: float | None
    ratio_ci95: Interval | None
    ratio_by_run: list[float | None] = Field(default_factory=list)


class Best(BaseModel, frozen=True):
    """The fastest arm of a cell."""

    arm: str
    over_plain: float | None
    over_plain_ci95: Interval | None
    as_good: list[str] | None
    """None where too few batches tell."""


class Answer(Place, frozen=True):
    """What is the fastest in a cell."""

    best: Best | None
    best_without_training: Best | None


class Mixture(Place, frozen=True):
    """A mixture beside its best member."""

    arm: str
    member: str
    over_member: float | None
    over_member_ci95: Interval | None


class DraftingArm(BaseModel, frozen=True):
    """What the name of an arm stands for."""

    draft: str
    settings: dict[str, Any]
    changes: dict[str, Any]
    texts: list[str]
    members: list[str] = Field(default_factory=list)
    """Of a mixture."""
    has_weights: bool = False
    """Whether any part of it was trained."""


class Writer(BaseModel, frozen=True):
    """A target and what it writes."""

    path: str
    texts: list[str]


class Comparison(Heading, frozen=True):
    """The file."""

    definitions: dict[str, str]
    rows: list[Row]
    choices: list[Choice]
    cells: list[TimedCell]
    runs: list[dict[str, Any]] = Field(default_factory=list)
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    peers: list[Peer] = Field(default_factory=list)
    arms: dict[str, DraftingArm] = Field(default_factory=dict)
    targets: list[Writer] = Field(default_factory=list)
    which_when: list[Answer] = Field(default_factory=list)
    mixtures: list[Mixture] = Field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """In the order of the run."""
        return list(dict.fromkeys(cell.text for cell in self.cells))

    @property
    def points(self) -> list[tuple[int, float]]:
        """(batch size, temperature) in the order of the run."""
        return list(dict.fromkeys(cell.point for cell in self.cells))


class TrainedArm(BaseModel, frozen=True):
    """A draft that is compared."""

    overrides: list[str]
    """Of `python -m train`."""
    folder: str | None = None
    """Of a draft that was given."""
    family: str
    num_parameters: int
    taps: list[int]
    optimizer: str | None = None
    refusals: dict[str, str | None] = Field(default_factory=dict)
    """Engine -> why it does not serve it; None where it does."""


class Budgets(BaseModel, frozen=True):
    """What trainings have equal."""

    tokens: int
    seconds: float | None
    """None where nothing was trained for equally long."""
    seeds: list[int]


class TrainingRow(BaseModel, frozen=True):
    """What training took: means over seeds."""

    arm: str
    budget: str
    code: str
    family: str
    num_parameters: int
    taps: list[int]
    feature_bytes_per_token: float
    seeds: int
    steps: float
    tokens: float
    seconds: float
    seconds_by_seed: list[float]
    tokens_per_s: float


class ArmQuality(BaseModel, frozen=True):
    """tau, acceptance by position and losslessness over all seeds."""

    arm: str
    budget: str
    code: str
    shape: str
    temperature: float
    num_draft_tokens: int
    tau: float
    tau_ci95: Interval | None
    tau_by_seed: list[float]
    tau_ratio: float | None = None
    """tau over that of the first arm with the same budget, shape and temperature, paired by seed and prompt."""
    tau_ratio_ci95: Interval | None = None
    expected_tau: float | None = None
    """What alpha promises on the target's own text; None for trees, untrained drafts and older files."""
    expected_tau_ci95: Interval | None = None
    expected_tau_ratio: float | None = None
    """Over that of the first arm, like tau_ratio."""
    expected_tau_ratio_ci95: Interval | None = None
    acceptance_by_position: list[float | None]
    mismatches: int
    near_ties: int
    tokens_checked: int


class CodeCost(BaseModel, frozen=True):
    """What a code of hidden states costs in tau."""

    arm: str
    code: str
    temperature: float
    feature_bytes_per_token: float
    tau_ratio: float
    tau_ratio_ci95: Interval | None


class Advice(BaseModel, frozen=True):
    """What figures advise under a condition."""

    condition: str = Field(alias="if")
    use: str
    because: str
    also: list[str]
    """Arms that the intervals cannot tell from the one named."""
    arm: str | None = None
    """None where no draft is advised."""


class Families(Heading, frozen=True):
    """The file of a comparison of families: built and written by its mode, read back by its page."""

    arms: dict[str, TrainedArm]
    engine: str | None = None
    budgets: Budgets
    records: dict[str, str]
    """Code of features -> folder of records; the first one's are those of all arms, but for those that are named
    behind the codes with their own."""
    shapes: dict[str, dict[str, Any]]
    prompts: dict[str, Any]
    definitions: dict[str, str]
    trainings: list[TrainingRow]
    quality: list[ArmQuality]
    codes: list[CodeCost]
    rows: list[Row]
    energy: list[dict[str, Any]] | None = None
    choices: list[dict[str, Any]]
    cells: list[dict[str, Any]]
    recommendation: list[Advice] = Field(default_factory=list)

    @property
    def timed(self) -> list[TimedCell]:
        """`cells`, as far as pages show them."""
        return [TimedCell.model_validate(one) for one in self.cells]

    @property
    def code(self) -> str:
        """That all arms were trained from."""
        return next(iter(self.records))
