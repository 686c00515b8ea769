"""The timed run: the drafts of the first seed at equal tokens, every arm at the draft length that suits it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from decode.config import SamplingConfig
from eval.arms.ours import Arm, OurArm, TransformersArm
from eval.config import EvalConfig
from eval.measure.cells import Cell, Point, Results, arm_times
from eval.measure.choose import try_settings
from eval.measure.component_times import CostMeter
from eval.measure.quality import sampling_at, settings_at, verifier_at
from eval.measure.speed import AUTOREGRESSIVE, TRANSFORMERS, mean_context
from eval.measure.timed_run import interleave, warm_up
from eval.modes.families.arms import ArmFacts
from eval.prompts.held_out import Prompt
from eval.results.cell_rows import Subject, make_row

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
            name: {str(k): self._arm(f"{name}, k={k}", name, k, point.temperature) for k in self._lengths(name)}
            for name in self.drafters
        }
        return try_settings(self.cfg, point, arms, self.screening[: point.batch_size * self._screened()])

    def measure(self, cell: Cell, choice: Mapping[str, Any]) -> dict[str, Any]:
        """The cell's content: every arm's times, and a row for every draft."""
        cfg, began = self.cfg, time.perf_counter()
        prompts = self.reported[: cell.batch_size * cfg.families.num_timed[cell.batch_size]]
        lengths = {name: int(choice["best"][name]) for name in self.drafters}
        arms = self._arms(cell.temperature, lengths)
        for _ in range(_WARM_UPS):
            warm_up(arms, self.screening, cell.batch_size, cfg.seed, cfg.decode.max_new_tokens)
        meter = CostMeter(
            self.model,
            self.drafters,
            {name: [k] for name, k in lengths.items()},
            mean_context(prompts, cfg.decode.max_new_tokens),
            cell.batch_size,
            cfg.timing.cost_repeats,
        )
        samples = interleave(
            arms,
            prompts,
            cfg.decode.max_new_tokens,
            cfg.timing.rounds,
            cfg.seed,
            cell.batch_size,
            f"timing {cell.name}",
            between_rounds=meter.sample,
        )
        costs = meter.result()
        return {
            **cell.as_dict(),
            "prompts": len(prompts),
            "mean_tokens": sum(len(prompt.ids) for prompt in prompts) / len(prompts),
            "dtype": self._dtype(),
            "arms": [arm_times(name, samples) for name in samples],
            "rows": [
                make_row(self._subject(name, k), cell, self._settings(k, cell), samples, costs[name, k], cfg.seed)
                for name, k in lengths.items()
            ],
            "seconds": time.perf_counter() - began,
        }

    def _arms(self, temperature: float, lengths: Mapping[str, int]) -> list[Arm]:
        return [
            OurArm(AUTOREGRESSIVE, self.model, None, settings_at(self.cfg, temperature)),
            TransformersArm(TRANSFORMERS, self.model, sampling_at(self.cfg, temperature)),
            *(self._arm(name, name, k, temperature) for name, k in lengths.items()),
        ]

    def _arm(self, name: str, draft: str, k: int, temperature: float) -> Arm:
        settings = vars(self._settings(k, Point(1, temperature)))
        return OurArm(name, self.model, self.drafters[draft], settings)

    def _settings(self, k: int, where: Point | Cell) -> SamplingConfig:
        """A plain chain of k tokens."""
        verifier: Any = verifier_at(self.cfg, where.temperature)
        temperature = where.temperature
        return replace(self.cfg.decode, temperature=temperature, verifier=verifier, num_draft_tokens=k, tree="chain")

    def _lengths(self, name: str) -> list[int]:
        """Without those beyond the draft's longest, which would be cut to it."""
        wanted = self.cfg.timing.choose_k or [self.cfg.decode.num_draft_tokens]
        most = getattr(self.drafters[name], "most_tokens", None)
        return wanted if most is None else [k for k in wanted if k <= most] or [most]

    def _screened(self) -> int:
        return self.cfg.families.screening_batches

    def _subject(self, name: str, k: int) -> Subject:
        return Subject(name, self.facts[name].family, name, f"k={k}", self._dtype())

    def _dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")
