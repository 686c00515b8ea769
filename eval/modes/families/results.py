"""From finished trainings and cells to results.json, and the words that define its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from decode.acceptance import acceptance_by_position
from decode.models.describe import ModelDescription
from eval.arms.base import PLAIN_ARMS
from eval.config import EvalConfig
from eval.modes.families.arms import ArmFacts, feature_bytes, own_records
from eval.modes.families.engines import Refusals
from eval.modes.families.measuring import KeptDraft, Measurement
from eval.modes.families.recommend import recommend
from eval.modes.families.trainings import Training
from eval.results.compared import ArmQuality, Budgets, CodeCost, Families, TrainedArm, TrainingRow
from eval.results.comparisons import cell_with_ratios
from eval.results.document import DEFINITIONS, heading, target_entry
from eval.results.energy import energy_of
from eval.results.statistics import (
    Estimate,
    bootstrap_crossed,
    described,
    fastest_arm,
    finite,
    ratio_of_ratios,
    ratio_of_sums,
)

Kept = Mapping[Training, KeptDraft]
_SHARED = (
    *(
        "acceptance_by_position",
        "tau_by_context",
        "tokens_per_s",
        "baseline",
        "speedup",
        "component_times",
        "predicted_speedup",
    ),
    *("realised", "losslessness", "dtype_flips", "repeated_4gram_share"),
)
_OWN = {
    "equal tokens": "Every arm reads as many training tokens; the time that takes may differ.",
    "equal time": "Every arm trains for as long, validation and export not counted: its steps are set by the pace of "
    "its training at equal tokens, and the seconds that it took then are reported. The target's pass that makes the "
    "hidden states of heads is in it where an arm takes them from the target (target_source), and not where they were "
    "recorded, once for all arms: its seconds stand beside the codes. With families.at_once above 1, "
    "trainings share the device.",
    "training": "One loop, the same texts in the same order, but for arms with records of their own; optimizer and "
    "rates are the arm's. The last weights are kept.",
    "tau": "Tokens emitted per target pass, the correction or bonus token included, pooled over all passes, prompts "
    "and seeds, on held-out prompts.",
    "tau_ratio": "tau over that of the first arm, paired by seed and prompt.",
    "expected_tau": "Tokens per target pass that alpha promises, from one pass of target and draft over the target's "
    "own text: 1 plus, over rounds of as many tokens as are drafted, the mean of the sum of products of alpha. A round "
    "begins at every token (of PARD and block drafts at every anchor), so its interval is narrower than that of tau. "
    "Decoding takes few rounds through easy text; so it is above tau where accepted tokens come in runs. Compare it "
    "with itself.",
    "tau_ci95": "Percentile bootstrap, 2,000 resamples of seeds and of prompts, each drawn on their own.",
    "draft cost": "Drafting one proposal of the chosen length, timed alone.",
    "draft length": "Chosen for every arm, batch size and temperature on prompts of the validation split, which are "
    "never reported: the fastest median.",
    "timed drafts": "Those of the first seed at equal tokens: intervals of speeds are over prompts, not trainings.",
    "features": "Hidden states of the target that an arm reads; bytes on disk per training token.",
}


@dataclass(frozen=True)
class Group:
    """All seeds of one arm, budget and code."""

    arm: str
    budget: str
    code: str
    is_coded: bool = False

    @classmethod
    def of(cls, one: Training) -> Group:
        """The group of a training."""
        return cls(one.arm, one.budget, one.code, one.is_coded)


@dataclass(frozen=True)
class Outcome:
    """What became of a round's draft."""

    drafted: int
    accepted: int


def grouped(kept: Kept) -> dict[Group, list[KeptDraft]]:
    """Group -> what is kept of its trainings, by seed."""
    found: dict[Group, list[KeptDraft]] = {}
    for one in sorted(kept, key=lambda one: one.seed):
        found.setdefault(Group.of(one), []).append(kept[one])
    return found


def measured(entries: Sequence[KeptDraft], temperature: float, shape: str) -> list[Measurement]:
    """Of every seed, what was measured at that temperature and shape; [] where the shape is another one's there."""
    return [one for entry in entries for one in entry.measured if (one.temperature, one.shape) == (temperature, shape)]


def counts(found: Sequence[Measurement]) -> np.ndarray:  # (seeds, prompts, 2)
    """Tokens emitted and target passes."""
    return np.array([one.counts for one in found], dtype=float)


def promised(found: Sequence[Measurement]) -> np.ndarray | None:  # (seeds, prompts, 2)
    """Tokens that rounds promise and rounds; None where a training has none."""
    each = [one.promised for one in found if one.promised is not None]
    every = np.array(each, dtype=float)
    return every if len(each) == len(found) and every[..., 1].any() else None


def _with_rounds(*each: np.ndarray) -> np.ndarray:  # (seeds, prompts, 2) each -> (seeds, prompts left, 2 of each)
    """Without the prompts whose text is too short for a round: drawn alone they would be a ratio of 0 to 0."""
    every = np.concatenate(each, axis=-1)
    return every[:, (every[..., 1::2] > 0).all((0, 2))]


def quality_row(group: Group, found: Sequence[Measurement], seed: int) -> ArmQuality:
    """tau, acceptance by position and losslessness over all seeds of a group."""
    each = counts(found)
    rounds = [Outcome(drafted, accepted) for one in found for drafted, accepted, n in one.outcomes for _ in range(n)]
    rounds_promised, expected = promised(found), None
    if rounds_promised is not None:
        expected = bootstrap_crossed(_with_rounds(rounds_promised), ratio_of_sums, seed)
    by_position = acceptance_by_position(rounds, max((one.drafted for one in rounds), default=0))
    return ArmQuality(
        arm=group.arm,
        budget=group.budget,
        code=group.code,
        shape=found[0].shape,
        temperature=found[0].temperature,
        num_draft_tokens=found[0].num_draft_tokens,
        **described("tau", bootstrap_crossed(each, ratio_of_sums, seed)),
        tau_by_seed=[float(ratio_of_sums(one[None])[0]) for one in each],
        **described("expected_tau", expected),
        acceptance_by_position=[finite(value) for value in by_position],
        mismatches=sum(one.mismatches for one in found),
        near_ties=sum(one.near_ties for one in found),
        tokens_checked=sum(one.tokens_checked for one in found),
    )


def tau_ratio(ours: Sequence[Measurement], other: Sequence[Measurement], seed: int) -> Estimate:
    """tau of one group over that of another, paired by seed and prompt."""
    return bootstrap_crossed(_with_rounds(counts(ours), counts(other)), ratio_of_ratios, seed)


def training_row(group: Group, entries: Sequence[KeptDraft], facts: ArmFacts, size: float) -> TrainingRow:
    """What training the group took: means over seeds; `size` is that of its hidden states in bytes per token."""
    paces = [entry.pace for entry in entries if entry.pace is not None]
    tokens, seconds = fmean(pace.tokens for pace in paces), fmean(pace.seconds for pace in paces)
    return TrainingRow(
        arm=group.arm,
        budget=group.budget,
        code=group.code,
        family=facts.family,
        num_parameters=facts.num_parameters,
        taps=list(facts.taps),
        feature_bytes_per_token=size,
        seeds=len(paces),
        steps=fmean(pace.steps for pace in paces),
        tokens=tokens,
        seconds=seconds,
        seconds_by_seed=[pace.seconds for pace in paces],
        tokens_per_s=tokens / seconds,
    )


@dataclass(frozen=True)
class MeasuredFamilies:
    """Everything a run measured."""

    target: ModelDescription
    facts: Mapping[str, ArmFacts]
    records: Mapping[str, str]
    """Code of features -> folder of records."""
    kept: Kept
    cells: Sequence[dict[str, Any]]
    choices: Sequence[dict[str, Any]]
    seconds: float
    refusals: Mapping[str, Refusals]
    """Arm -> what engines say of it."""


def make_results(cfg: EvalConfig, run: MeasuredFamilies) -> Families:
    """The content of results.json."""
    groups, families = grouped(run.kept), cfg.families
    trained = {group: entries for group, entries in groups.items() if group.budget != "given"}
    found = Families(
        **heading(cfg, run.seconds),
        target=target_entry(run.target, run.cells[0]["dtype"] if run.cells else run.target.dtype_name),
        arms={arm: _arm(cfg, run, arm) for arm in run.facts},
        engine=families.engine,
        budgets=Budgets(tokens=families.tokens, seconds=families.seconds, seeds=families.seeds),
        records=dict(run.records) | own_records(cfg),
        shapes={name: dict(changes) for name, changes in families.shapes.items()},
        prompts=_prompts(cfg, run),
        definitions={**_OWN, **{name: DEFINITIONS[name] for name in _SHARED}},
        trainings=[training_row(one, each, run.facts[one.arm], _bytes(cfg, run, one)) for one, each in trained.items()],
        quality=_quality(cfg, groups),
        codes=_codes(cfg, groups, run),
        rows=[row for cell in run.cells for row in cell["rows"]],
        energy=energy_of(run.cells),
        choices=list(run.choices),
        cells=[_cell(cell, cfg.seed) for cell in run.cells],
    )
    return found.model_copy(update={"recommendation": recommend(found)})


def _arm(cfg: EvalConfig, run: MeasuredFamilies, arm: str) -> TrainedArm:
    given = {"overrides": cfg.families.arms.get(arm, []), "folder": cfg.drafts.get(arm)}
    return TrainedArm(**given, **asdict(run.facts[arm]), refusals=dict(run.refusals[arm]))


def _bytes(cfg: EvalConfig, run: MeasuredFamilies, group: Group) -> float:
    """Of hidden states on disk, per token."""
    taps, folder = run.facts[group.arm].taps, own_records(cfg).get(group.arm, run.records[group.code])
    return feature_bytes(folder, len(taps)) if taps else 0.0


def _quality(cfg: EvalConfig, groups: Mapping[Group, Any]) -> list[ArmQuality]:
    return [
        quality_row(group, found, cfg.seed).model_copy(update=_beside_first(cfg, groups, group, found))
        for group, entries in groups.items()
        for temperature in cfg.temperatures
        for shape in cfg.families.shapes
        if (found := measured(entries, temperature, shape))
    ]


def _beside_first(
    cfg: EvalConfig, groups: Mapping[Group, Any], group: Group, found: Sequence[Measurement]
) -> dict[str, Any]:
    """tau over that of the first arm, decoded and expected, of trainings at equal tokens; {} for the first arm."""
    first = Group(next(iter(cfg.families.arms)), "tokens", group.code)
    if group.budget != "tokens" or group.is_coded or group == first:
        return {}
    there = measured(groups[first], found[0].temperature, found[0].shape)
    told = described("tau_ratio", tau_ratio(found, there, cfg.seed))
    ours, other = promised(found), promised(there)
    if ours is not None and other is not None:
        ratio = bootstrap_crossed(_with_rounds(ours, other), ratio_of_ratios, cfg.seed)
        told |= described("expected_tau_ratio", ratio)
    return told


def _codes(cfg: EvalConfig, groups: Mapping[Group, Any], run: MeasuredFamilies) -> list[CodeCost]:
    """Every code of the arm that was trained from several, with tau over that from the first."""
    first, arm = cfg.families.feature_codes[0], cfg.families.feature_arm
    coded = [group for group in groups if group.is_coded]
    if not coded or arm is None:
        return []
    plain, shape = Group(arm, "tokens", first), next(iter(cfg.families.shapes))
    same = {group: _seeded(groups[group], cfg.families.feature_seeds) for group in (plain, *coded)}
    return [
        CodeCost(
            arm=arm,
            code=group.code,
            temperature=temperature,
            feature_bytes_per_token=_bytes(cfg, run, group),
            **described("tau_ratio", tau_ratio(ours, measured(same[plain], temperature, shape), cfg.seed)),
        )
        for group in same
        for temperature in cfg.temperatures
        if (ours := measured(same[group], temperature, shape))
    ]


def _seeded(entries: Sequence[KeptDraft], seeds: Sequence[int]) -> list[KeptDraft]:
    return [one for one in entries if one.seed in seeds]


def _prompts(cfg: EvalConfig, run: MeasuredFamilies) -> dict[str, Any]:
    checked = {
        "source": cfg.prompts.file or f"held-out split of {cfg.data.name}",
        "checked": cfg.lossless.prompts,
        "checked_tokens": cfg.lossless.tokens,
        "checked_dtype": cfg.lossless.dtype,
    }
    if not run.cells:
        return checked
    return checked | {
        "screening_source": cfg.prompts.file or f"validation split of {cfg.data.name}",
        "mean_tokens": sum(cell["mean_tokens"] for cell in run.cells) / len(run.cells),
        "max_new_tokens": cfg.decode.max_new_tokens,
        "screening_tokens": cfg.timing.screening_tokens,
        "screening_batches": cfg.families.screening_batches,
        "draft_lengths": cfg.timing.choose_k or [cfg.decode.num_draft_tokens],
        "rounds": cfg.timing.rounds,
        "batches": {str(rows): count for rows, count in cfg.families.num_timed.items()},
    }


def _cell(cell: dict[str, Any], seed: int) -> dict[str, Any]:
    """The cell with every arm's speed, and its ratio over the faster way without a draft."""
    base = fastest_arm([cell], PLAIN_ARMS)
    return {**cell_with_ratios(cell, lambda _: {"over_baseline": str(base)}, seed), "baseline": base}
