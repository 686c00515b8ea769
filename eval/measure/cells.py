"""Cells of a comparison: an interleaved run of all arms, whose choices and results are kept as soon as they are done,
so that a killed run goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from decode.common.run_folder import RunFolder
from decode.common.sealed import read_sealed, write_sealed
from decode.sampling.warp import Sampling
from eval.arms.base import Arm
from eval.config import TOKEN_FOR_TOKEN, EvalConfig
from eval.measure.energy import meter_of
from eval.measure.losslessness import Check, check_samples
from eval.measure.timed_run import (
    CostMeter,
    Samples,
    call_seconds_per_token,
    fastest,
    interleave,
    is_plain_chain,
    seconds_per_token,
    warm_up,
)
from eval.prompts.prompt import Prompt
from eval.results.energy import energy_entry, energy_pairs
from eval.results.figures import Drafted, Scope, make_row, tokens_per_s


@dataclass(frozen=True)
class Point:
    """A batch size and a temperature: settings are chosen there on all kinds of text together, unless a comparison is
    of the texts."""

    batch_size: int
    temperature: float

    @property
    def name(self) -> str:
        """For files and messages."""
        return f"batch{self.batch_size}-T{str(self.temperature).removesuffix('.0')}"


@dataclass(frozen=True)
class Cell:
    """One interleaved run: all arms on the same prompts."""

    batch_size: int
    temperature: float
    text: str

    @property
    def point(self) -> Point:
        """Where its settings were chosen."""
        return Point(self.batch_size, self.temperature)

    @property
    def name(self) -> str:
        """For files and messages."""
        return f"{self.point.name}-{_in_a_file_name(self.text)}"

    @property
    def words(self) -> str:
        """For pages."""
        return f"batch {self.batch_size}, T={self.temperature:g}, {self.text}"


def _in_a_file_name(text: str) -> str:
    """A label may be as long as it likes, and hold any character; two of them never become one."""
    plain = re.sub(r"[^\w.-]+", "_", text)[:60]
    return plain if plain == text else f"{plain}-{sha256(text.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Results:
    """What is already measured, in the run folder: `cells/NAME.json` and `choices/NAME.json`."""

    folder: RunFolder

    def choice(self, at: Point | Cell) -> dict[str, Any] | None:
        """What was chosen there, or None."""
        return self.read(f"choices/{at.name}.json")

    def keep_choice(self, at: Point | Cell, choice: dict[str, Any]) -> None:
        """Write it whole or not at all."""
        self.keep(f"choices/{at.name}.json", choice)

    def cell(self, cell: Cell) -> dict[str, Any] | None:
        """What was measured there, or None."""
        return self.read(f"cells/{cell.name}.json")

    def keep_cell(self, cell: Cell, content: dict[str, Any]) -> None:
        """Write it whole or not at all."""
        self.keep(f"cells/{cell.name}.json", content)

    def missing(self, every: Iterable[Cell]) -> Iterator[Cell]:
        """Cells still to be measured."""
        return (cell for cell in every if self.cell(cell) is None)

    def read(self, name: str) -> dict[str, Any] | None:
        """A file of the folder, or None; InputError where it was changed since."""
        file = self.folder.path / name
        return read_sealed(file) if file.is_file() else None

    def keep(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of the folder whole or not at all."""
        write_sealed(self.folder.file(name), content)


def arm_times(name: str, samples: Samples) -> dict[str, Any]:
    """An arm's times by batch of prompts, so that ratios can be paired afterwards."""
    return {
        "arm": name,
        "seconds_per_token": _numbers(seconds_per_token(samples[name])),
        "call_seconds_per_token": _numbers(call_seconds_per_token(samples[name])),
        "tokens": sum(sample.tokens for group in samples[name] for sample in group),
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def choose(
    cfg: EvalConfig, point: Point, families: Mapping[str, Mapping[str, Arm]], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """`tried_settings` after a warm-up of every arm."""
    began = time.perf_counter()
    arms = [arm for family in families.values() for arm in family.values()]
    warm_up(arms, prompts, point.batch_size, cfg.seed, cfg.timing.screening_tokens)
    return {**tried_settings(cfg, point, families, prompts), "seconds": time.perf_counter() - began}


def tried_settings(
    cfg: EvalConfig, at: Point | Cell, families: Mapping[str, Mapping[str, Arm]], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """{"best": family -> setting, "tokens_per_s": family -> setting -> speed, "seconds_per_token": the same by batch of
    prompts, "prompts", "seconds"} of warm arms by family and setting, each continuing `prompts` by
    timing.screening_tokens tokens once."""
    began, size, tokens = time.perf_counter(), at.batch_size, cfg.timing.screening_tokens
    arms = [arm for family in families.values() for arm in family.values()]
    samples = interleave(arms, prompts, tokens, 1, cfg.seed, size, f"choosing settings, {at.name}")
    speeds = {
        family: {setting: tokens_per_s(samples[arm.name]) for setting, arm in settings.items()}
        for family, settings in families.items()
    }
    return {
        **asdict(at),
        "best": {family: fastest(of) for family, of in speeds.items()},
        "tokens_per_s": speeds,
        "seconds_per_token": {
            family: {setting: _numbers(seconds_per_token(samples[arm.name])) for setting, arm in settings.items()}
            for family, settings in families.items()
        },
        "prompts": len(prompts),
        "seconds": time.perf_counter() - began,
    }


@dataclass(frozen=True)
class CellRun:
    """The models of a timed run, held from cell to cell."""

    cfg: EvalConfig
    model: PreTrainedModel
    drafters: Mapping[str, Any]
    """Draft -> drafter, of the drafts whose passes are timed alone; rows of others predict nothing."""

    @property
    def dtype(self) -> str:
        """The run's own precision."""
        return str(self.model.dtype).removeprefix("torch.")

    def time(
        self,
        cell: Cell,
        arms: Sequence[Arm],
        drafted: Sequence[Drafted],
        prompts: Sequence[Prompt],
        scopes: Sequence[Scope] = (),
        judged: Collection[str] = (),
    ) -> dict[str, Any]:
        """The cell's content: every arm's times by batch of prompts, and a row for each arm in `drafted` and scope (all
        prompts, where none is named). The texts of the arms in `judged` are held against an uncached forward
        afterwards, in the run's own precision: rounding flips near-ties, a fault of our passes far more."""
        cfg, began = self.cfg, time.perf_counter()
        cost_meter, energy = self._cost_meter(cell, drafted, prompts), meter_of(cfg.timing.watts, self.model)
        cost_meter.warm_up()
        samples = interleave(
            arms,
            prompts,
            cfg.decode.max_new_tokens,
            cfg.timing.rounds,
            cfg.seed,
            cell.batch_size,
            f"timing {cell.name}",
            before_each=cost_meter.sample,
            meter=energy,
        )
        costs = cost_meter.result()
        scopes = scopes or [Scope(cell.text, range(len(samples[arms[0].name])))]
        uncached = {one.arm: self._uncached(one, cell, samples, prompts) for one in drafted if one.arm in judged}
        rows = [
            make_row(
                one,
                scope,
                samples,
                costs.get((one.draft, one.settings.num_draft_tokens)) if is_plain_chain(one.settings) else None,
                uncached.get(one.arm),
                cell.batch_size,
                self.dtype,
                cfg.seed,
                energy,
            )
            for scope in scopes
            for one in drafted
        ]
        return {
            **asdict(cell),
            "prompts": len(prompts),
            "mean_tokens": sum(len(prompt.ids) for prompt in prompts) / len(prompts),
            "dtype": self.dtype,
            "arms": [arm_times(name, samples) for name in samples],
            "rows": [row.model_dump() for row in rows],
            "energy": [
                energy_entry(cell.words, name, energy_pairs(groups), energy, cfg.seed)
                for name, groups in samples.items()
            ],
            "seconds": time.perf_counter() - began,
        }

    def _cost_meter(self, cell: Cell, drafted: Sequence[Drafted], prompts: Sequence[Prompt]) -> CostMeter:
        lengths: dict[str, list[int]] = {}
        for one in drafted:
            if one.draft in self.drafters and is_plain_chain(one.settings):
                lengths.setdefault(one.draft, []).append(one.settings.num_draft_tokens)
        unique = {draft: sorted(set(each)) for draft, each in lengths.items()}
        context = mean_context(prompts, self.cfg.decode.max_new_tokens)
        repeats = -(-self.cfg.timing.cost_repeats * cell.batch_size // len(prompts))  # of a round, over its groups
        return CostMeter(self.model, self.drafters, unique, context, cell.batch_size, repeats)

    def _uncached(self, one: Drafted, cell: Cell, samples: Samples, prompts: Sequence[Prompt]) -> list[Check] | None:
        settings = one.settings
        if settings.verifier not in TOKEN_FOR_TOKEN:
            return None
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, settings.min_p)
        return check_samples(self.model, prompts, samples[one.arm], cell.batch_size, sampling, self.cfg.seed)


def mean_context(prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    """Tokens in the cache half way through the mean prompt's continuation."""
    return round(sum(len(prompt.ids) for prompt in prompts) / len(prompts) + max_new_tokens / 2)
