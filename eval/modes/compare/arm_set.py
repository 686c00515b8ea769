"""What a comparison asks of its arm set: which targets there are, which settings are tried, and the arms of a cell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedModel

from decode.config import ModelConfig
from decode.models.describe import ModelDescription
from decode.sampling.stopping import own_eos_ids
from eval.arms.base import VLLM, Arm
from eval.arms.vllm_engines import Engines
from eval.comparison_config import ComparisonConfig
from eval.config import EvalConfig
from eval.inputs import Named, sampling_at
from eval.measure.cells import Cell, Point
from eval.modes.compare.way import length_name
from eval.prompts.kinds import TextPrompts
from eval.prompts.prompt import Prompt
from eval.results.compared import Choice
from eval.results.figures import Drafted

Choices = Mapping[Point | Cell, Mapping[str, Any]]
"""Where settings are chosen -> what was chosen there."""


@dataclass(frozen=True)
class Target:
    """A target with the kinds of text that it writes. Nothing of its weights is read."""

    key: str
    """The setting that names it."""
    source: ModelConfig
    description: ModelDescription
    texts: tuple[str, ...]
    families: dict[str, str]
    """What drafts for it -> its family."""
    max_positions: int
    """Longest context in tokens that target and drafts all know."""
    refused: dict[str, str] = field(default_factory=dict)
    """Arm that does not fit it -> why."""


class ArmSet(ABC):
    """What is compared, before a weight is loaded."""

    is_by_text: ClassVar[bool]
    """Whether settings are chosen for each kind of text apart."""
    vllm_drafting: ClassVar[str]
    """Name of vLLM's arms with a draft."""
    asked_by: ClassVar[str]
    """The settings that say how many prompts are needed."""

    def __init__(self, cfg: EvalConfig) -> None:
        self.cfg = cfg

    @property
    @abstractmethod
    def sizes(self) -> ComparisonConfig:
        """What a user sets about this comparison."""

    @abstractmethod
    def targets(self) -> list[Target]:
        """The targets that some text is written by; ConfigError and InputError for what cannot be compared."""

    @abstractmethod
    def plan(self, targets: Sequence[Target]) -> list[str]:
        """What is tried and timed, for a person."""

    @abstractmethod
    def tokens(self, target: Target, cell: Cell) -> float:
        """Tokens of plain decoding that take as long as the cell, as an order of magnitude."""

    @abstractmethod
    def tried(self, target: Target, place: Point | Cell, best: Mapping[str, str]) -> dict[str, list[str]]:
        """Arm -> settings of it that this run tries there, of the arms that `best`, an earlier choice, has to name."""

    @abstractmethod
    def drafters(self, target: Target) -> dict[str, Named]:
        """Name -> what each drafter is loaded by."""

    @abstractmethod
    def speculation(self, draft_tokens: int) -> dict[str, Any]:
        """vLLM's own setting for it."""

    @abstractmethod
    def in_words(self) -> dict[str, Any]:
        """What results.json says of the drafts and settings that are compared."""

    @abstractmethod
    def prompts_in_words(self, texts: Mapping[str, TextPrompts], cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What results.json says of the prompts besides."""

    def cells(self, targets: Sequence[Target]) -> list[Cell]:
        """All cells in the order of the run: passes captured and compiled for a batch size serve all of its cells."""
        return [
            Cell(rows, temperature, text)
            for target in targets
            for rows in self.sizes.batch_sizes
            for temperature in self.cfg.temperatures
            for text in target.texts
        ]

    def place(self, cell: Cell) -> Point | Cell:
        """Where the settings of a cell are chosen."""
        return cell if self.is_by_text else cell.point

    def places(self, targets: Sequence[Target]) -> list[Point | Cell]:
        """All of them."""
        return list(dict.fromkeys(map(self.place, self.cells(targets))))

    def engines(self, chosen: Sequence[str | None] = ()) -> dict[str, int | None]:
        """vLLM's arms -> draft tokens per pass, None decodes without a draft; nothing without an interpreter to run it.
        Of those that draft only the `chosen` ones, where any are."""
        if self.cfg.peers.vllm_python is None:
            return {}
        lengths = {length_name(k): k for k in self.cfg.peers.vllm_draft_tokens}
        wanted = {one for one in chosen if one is not None} or set(lengths)
        return {VLLM: None} | {f"{self.vllm_drafting}, {name}": k for name, k in lengths.items() if name in wanted}


@dataclass(frozen=True)
class Loaded(ABC):
    """One target, its drafters and its engines, held for all of its cells: what arms are made of."""

    arm_set: ArmSet
    target: Target
    model: PreTrainedModel
    drafters: Mapping[str, Any]
    engines: Engines
    texts: Mapping[str, TextPrompts]

    @property
    def cfg(self) -> EvalConfig:
        """Of the run."""
        return self.arm_set.cfg

    @property
    def drafts_timed_alone(self) -> Mapping[str, Any]:
        """Drafts whose passes are timed alone, for predictions."""
        return {}

    @abstractmethod
    def choose(self, cell: Cell) -> dict[str, Any]:
        """{"best": arm -> setting, "tokens_per_s": arm -> setting -> speed, ...}, on prompts that are not reported."""

    @abstractmethod
    def warm_arms(self, cell: Cell, choice: Choice) -> list[Arm]:
        """All arms of a cell, each at its chosen setting and warm."""

    @abstractmethod
    def left_out(self, cell: Cell) -> dict[str, str]:
        """Arm -> why it does not run in this cell."""

    @abstractmethod
    def drafted(self, cell: Cell, choice: Choice) -> Iterator[Drafted]:
        """The arms that rows are about."""

    def vllm_arms(self, temperature: float) -> dict[str, Arm]:
        """Name -> arm of an engine that runs."""
        eos = own_eos_ids(self.model.generation_config, self.model.config.get_text_config().vocab_size)
        return self.engines.arms(sampling_at(self.cfg, temperature), eos)

    def facts(self, choice: Choice) -> dict[str, Any]:
        """What results.json says of a cell besides."""
        return {}

    def screening(self, cell: Cell, text: str) -> list[Prompt]:
        """Prompts of a text that settings are chosen on at the cell's batch size."""
        return self.texts[text].screening[: cell.batch_size * self.arm_set.sizes.batches_screened(cell.batch_size)]
