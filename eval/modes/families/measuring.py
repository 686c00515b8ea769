"""What is measured of trained drafts: tau, acceptance and losslessness of each against the target's own text, and
the speed of the first seed's, every arm at the draft length that suits it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from transformers import PreTrainedModel

from decode.drafters.base import Drafter
from decode.sampling.config import SamplingConfig
from decode.stats import Round
from eval.arms.base import Arm
from eval.arms.ours import OurArm, drafting, our_arm, plain_arms
from eval.config import EvalConfig
from eval.inputs import sampling_at
from eval.measure.alpha import Alphas, measure_alpha
from eval.measure.cells import Cell, CellRun, Point, Results, choose
from eval.measure.continuations import Job, Text, batches
from eval.measure.losslessness import Check, check, margin_from
from eval.measure.quality import write_alone
from eval.measure.timed_run import WARM_UPS, sharing_captures, warm_up
from eval.modes.families.arms import ArmFacts
from eval.modes.families.config import shape_settings
from eval.modes.families.trainings import Pace
from eval.prompts.prompt import Prompt
from eval.results.compared import Choice
from eval.results.figures import Drafted


class Measurement(BaseModel, frozen=True):
    """A draft at one temperature and shape."""

    temperature: float
    shape: str
    num_draft_tokens: int
    counts: list[list[int]]
    """By prompt [tokens emitted, target passes]."""
    outcomes: list[list[int]]
    """[drafted, accepted, rounds of both]."""
    mismatches: int
    near_ties: int
    tokens_checked: int
    promised: list[tuple[float, int]] | None = None
    """By prompt (tokens that rounds promise, rounds) on the target's own text, from one pass; None for trees, adaptive
    lengths, and where training does not unroll so far."""


class KeptDraft(BaseModel, frozen=True):
    """What is kept of a training or a given draft."""

    seed: int
    pace: Pace | None
    """None of a draft that was not trained here."""
    measured: list[Measurement]
    seconds: float
    """Of measuring."""


@dataclass
class Speculator:
    """Continues jobs in batches like eval.measure.continuations.generator, and keeps the rounds of its first call:
    later calls go on behind a divergence, where rounds would count twice."""

    arm: OurArm
    batch_size: int
    seed: int
    rounds: dict[int, list[Round]] = field(default_factory=dict)
    """Prompt -> target passes."""

    def __call__(self, jobs: Sequence[Job]) -> list[Text]:
        """Texts of the jobs, each cut to its own max_new."""
        texts, kept = [], defaultdict[int, list[Round]](list)
        for batch in batches(jobs, self.batch_size):
            longest = max(job.max_new for job in batch)
            sample = self.arm.run([job.prompt for job in batch], [job.row for job in batch], longest, self.seed)
            for one in sample.rounds:
                kept[batch[one.row].row].append(one)
            for job, ids in zip(batch, sample.new_ids, strict=True):
                texts.append(Text(job.row, job.prompt, tuple(ids[: job.max_new])))
        self.rounds = self.rounds or dict(kept)
        return texts


@dataclass(frozen=True)
class Judge:
    """What every draft is measured with: the target in lossless.dtype, and what it wrote alone."""

    cfg: EvalConfig
    model: PreTrainedModel
    references: Mapping[float, list[Text]]
    """Temperature -> the target's own texts."""

    @classmethod
    def of(cls, cfg: EvalConfig, model: PreTrainedModel, prompts: Sequence[Prompt]) -> Judge:
        """Write the references: lossless.tokens after each of lossless.prompts."""
        texts = {one: write_alone(cfg, model, one, prompts, is_first=True) for one in cfg.temperatures}
        return cls(cfg, model, texts)

    def measure(self, drafter: Drafter, shapes: Sequence[str]) -> list[Measurement]:
        """One per temperature and shape."""
        found = []
        for temperature in self.cfg.temperatures:
            every = shape_settings(self.cfg.families, self.cfg.decode, temperature)
            wanted = {shape: settings for shape, settings in every.items() if shape in shapes}
            alphas = Alphas({})
            if any(_is_promised(one) for one in wanted.values()):
                texts, sampling = self.references[temperature], sampling_at(self.cfg, temperature)
                (alphas,) = measure_alpha(self.model, {"": drafter}, texts, sampling).values()
            found += [self._measure(drafter, temperature, shape, one, alphas) for shape, one in wanted.items()]
        return found

    def _measure(
        self, drafter: Drafter, temperature: float, shape: str, settings: SamplingConfig, alphas: Alphas
    ) -> Measurement:
        cfg, reference = self.cfg, self.references[temperature]
        arm = OurArm("draft", self.model, drafter, vars(settings))
        speculate = Speculator(arm, cfg.lossless.batch_size, cfg.seed)
        margin = margin_from(self.model, sampling_at(cfg, temperature), cfg.seed)
        total = sum(check(reference, speculate, margin), Check())
        every = [one for rounds in speculate.rounds.values() for one in rounds]
        outcomes = Counter((one.drafted, one.accepted) for one in every)
        return Measurement(
            temperature=temperature,
            shape=shape,
            num_draft_tokens=settings.num_draft_tokens,
            counts=[_counts(speculate.rounds.get(text.row, [])) for text in reference],
            outcomes=[[*outcome, count] for outcome, count in sorted(outcomes.items())],
            mismatches=total.mismatches,
            near_ties=total.near_ties,
            tokens_checked=total.tokens,
            promised=_promised(alphas, reference, settings, drafter),
        )


def _counts(rounds: Sequence[Round]) -> list[int]:
    """[tokens emitted, target passes] of one prompt."""
    return [sum(one.emitted for one in rounds), len(rounds)]


def _is_promised(settings: SamplingConfig) -> bool:
    """Whether every round drafts as many tokens, one after another."""
    return settings.is_chain and not settings.adaptive


def _promised(
    alphas: Alphas, reference: Sequence[Text], settings: SamplingConfig, drafter: Drafter
) -> list[tuple[float, int]] | None:
    k, depth = settings.num_draft_tokens, alphas.depth
    goes_on = drafter.most_tokens is None and depth is not None and depth < k  # decoding, where unrolling ends
    if goes_on or not alphas.by_row or not _is_promised(settings):
        return None
    found = alphas.promised(k)
    return [found.get(text.row, (0.0, 0)) for text in reference]


def points(cfg: EvalConfig) -> list[Point]:
    """Batch size outermost: captured passes serve all cells of their shape."""
    return [Point(rows, temperature) for rows in cfg.families.batch_sizes for temperature in cfg.temperatures]


def cells(cfg: EvalConfig) -> list[Cell]:
    """In the order of the run."""
    return [Cell(one.batch_size, one.temperature, cfg.prompts.label) for one in points(cfg)]


@dataclass(frozen=True)
class Timing:
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
            results.keep_cell(cell, self.measure(cell, Choice.model_validate(choice)))

    def choose(self, point: Point) -> dict[str, Any]:
        """The fastest of timing.choose_k for every arm, on validation prompts."""
        arms = {
            name: {str(k): self._arm(self._drafted(name, k, point.temperature, f"{name}, k={k}")) for k in lengths}
            for name in self.drafters
            for lengths in [self._lengths(name)]
        }
        wanted = point.batch_size * self.cfg.families.screening_batches
        return choose(self.cfg, point, arms, self.screening[:wanted])

    def measure(self, cell: Cell, choice: Choice) -> dict[str, Any]:
        """The cell's content: every arm's times, and a row for every draft."""
        cfg, best = self.cfg, choice.best
        prompts = self.reported[: cell.batch_size * cfg.families.num_timed[cell.batch_size]]
        drafted = [self._drafted(name, int(best[name]), cell.temperature, name) for name in self.drafters]
        arms = [*plain_arms(cfg, self.model, cell.temperature), *map(self._arm, drafted)]
        longest = max(len(one.ids) for one in [*prompts, *self.screening]) + cfg.decode.max_new_tokens
        with sharing_captures(longest, cell.batch_size):
            warm_up(arms, self.screening, cell.batch_size, cfg.seed, cfg.decode.max_new_tokens, prompts, WARM_UPS)
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
        most = self.drafters[name].most_tokens
        return wanted if most is None else [k for k in wanted if k <= most] or [most]
