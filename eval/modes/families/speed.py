"""The timed run: the drafts of the first seed at equal tokens, every arm at the draft length that suits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from eval.arms.base import Arm
from eval.arms.ours import drafting, our_arm, plain_arms
from eval.config import EvalConfig
from eval.measure.cell_run import CellRun, choose
from eval.measure.cells import Cell, Point, Results
from eval.measure.timed_run import warm_up
from eval.modes.families.arms import ArmFacts
from eval.prompts.held_out import Prompt
from eval.results.figures import Drafted

_WARM_UPS = 2
"""Runs of every arm before it is timed; a pass is captured after some uses of its shape."""


def points(cfg: EvalConfig) -> list[Point]:
    """Batch size outermost: captured passes serve all cells of their shape."""
    return [Point(rows, temperature) for rows in cfg.families.batch_sizes for temperature in cfg.temperatures]


def cells(cfg: EvalConfig) -> list[Cell]:
    """In the order of the run."""
    return [Cell(one.batch_size, one.temperature, cfg.prompts.label) for one in points(cfg)]


@dataclass(frozen=True)
class Race:
    """What is timed: the target in its own precision, a draft for every arm, and prompts."""

    cfg: EvalConfig
    model: PreTrainedModel
    drafters: Mapping[str, Any]
    facts: Mapping[str, ArmFacts]
    reported: Sequence[Prompt]
    screening: Sequence[Prompt]

    def run(self, results: Results) -> None:
        """Every cell that is missing, draft lengths first, each kept as soon as it is done."""
        for cell in list(results.missing(cells(self.cfg))):
            choice = results.choice(cell.point)
            if choice is None:
                choice = self.choose(cell.point)
                results.keep_choice(cell.point, choice)
            results.keep_cell(cell, self.measure(cell, choice))

    def choose(self, point: Point) -> dict[str, Any]:
        """The fastest of timing.choose_k for every arm, on validation prompts."""
        arms = {
            name: {str(k): self._arm(self._drafted(name, k, point.temperature, f"{name}, k={k}")) for k in lengths}
            for name in self.drafters
            for lengths in [self._lengths(name)]
        }
        wanted = point.batch_size * self.cfg.families.screening_batches
        return choose(self.cfg, point, arms, self.screening[:wanted])

    def measure(self, cell: Cell, choice: Mapping[str, Any]) -> dict[str, Any]:
        """The cell's content: every arm's times, and a row for every draft."""
        cfg, best = self.cfg, choice["best"]
        prompts = self.reported[: cell.batch_size * cfg.families.num_timed[cell.batch_size]]
        drafted = [self._drafted(name, int(best[name]), cell.temperature, name) for name in self.drafters]
        arms = [*plain_arms(cfg, self.model, cell.temperature), *map(self._arm, drafted)]
        for _ in range(_WARM_UPS):
            warm_up(arms, self.screening, cell.batch_size, cfg.seed, cfg.decode.max_new_tokens)
        return CellRun(cfg, self.model, self.drafters).time(cell, arms, drafted, prompts)

    def _drafted(self, name: str, k: int, temperature: float, arm: str) -> Drafted:
        """A plain chain of k tokens."""
        settings = drafting(self.cfg, temperature, k, tree="chain")
        return Drafted(arm, self.facts[name].family, name, settings, f"k={k}")

    def _arm(self, one: Drafted) -> Arm:
        return our_arm(one.arm, self.model, self.drafters[one.draft], one.settings)

    def _lengths(self, name: str) -> list[int]:
        """Without those beyond the draft's longest, which would be cut to it."""
        wanted = self.cfg.timing.choose_k or [self.cfg.decode.num_draft_tokens]
        most = getattr(self.drafters[name], "most_tokens", None)
        return wanted if most is None else [k for k in wanted if k <= most] or [most]
