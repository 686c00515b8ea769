"""From finished trainings and cells to results.json, and the words that define its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decode.models.load import ModelDescription
from eval.arms.base import AUTOREGRESSIVE, TRANSFORMERS
from eval.config import EvalConfig
from eval.modes.families.arms import ArmFacts, feature_bytes
from eval.modes.families.groups import Group, Kept, grouped, measured, quality_row, tau_ratio, training_row
from eval.modes.families.recommend import recommend
from eval.results.document import DEFINITIONS, heading, target_entry
from eval.results.figures import described
from eval.results.statistics import arm_ratio, arm_speed, fastest_arm

_SHARED = ("acceptance_by_position", "tokens_per_s", "baseline", "speedup", "component_times", "predicted_speedup")
_SHARED += ("realised", "losslessness", "dtype_flips", "repeated_4gram_share")
_OWN = {
    "equal tokens": "Every arm reads as many training tokens; the time that takes may differ.",
    "equal time": "Every arm trains for as long, validation and export not counted: its steps are set by the pace of "
    "its training at equal tokens, and the seconds that it took then are reported. The target's pass that makes the "
    "hidden states of heads is not in it: once for all arms, its seconds stand beside the codes.",
    "training": "One loop, one optimizer, the same texts in the same order; the learning rate is the arm's own. The "
    "last weights are kept.",
    "tau": "Tokens emitted per target pass, the correction or bonus token included, pooled over all passes, prompts "
    "and seeds, on held-out prompts.",
    "tau_ci95": "Percentile bootstrap, 2,000 resamples of seeds and of prompts, each drawn on their own.",
    "draft cost": "Drafting one proposal of the chosen length, timed alone.",
    "draft length": "Chosen for every arm, batch size and temperature on prompts of the validation split, which are "
    "never reported: the fastest median.",
    "timed drafts": "Those of the first seed at equal tokens: intervals of speeds are over prompts, not trainings.",
    "features": "Hidden states of the target that an arm reads; bytes on disk per training token.",
}


@dataclass(frozen=True)
class Measured:
    """Everything a run measured."""

    target: ModelDescription
    facts: Mapping[str, ArmFacts]
    records: Mapping[str, str]
    """Code of features -> folder of records."""
    kept: Kept
    cells: Sequence[dict[str, Any]]
    choices: Sequence[dict[str, Any]]
    seconds: float


def make_results(cfg: EvalConfig, run: Measured) -> dict[str, Any]:
    """The content of results.json."""
    groups = grouped(run.kept)
    results = {
        **heading(cfg, run.seconds),
        "target": target_entry(run.target, run.cells[0]["dtype"]),
        "arms": {arm: {"overrides": cfg.families.arms[arm], **asdict(one)} for arm, one in run.facts.items()},
        "budgets": {"tokens": cfg.families.tokens, "seconds": cfg.families.seconds, "seeds": cfg.families.seeds},
        "records": dict(run.records),
        "shapes": {name: dict(changes) for name, changes in cfg.families.shapes.items()},
        "prompts": _prompts(cfg, run),
        "definitions": {**_OWN, **{name: DEFINITIONS[name] for name in _SHARED}},
        "trainings": [training_row(one, entries, _facts(run, one)) for one, entries in groups.items()],
        "quality": _quality(cfg, groups),
        "codes": _codes(cfg, groups, run),
        "rows": [row for cell in run.cells for row in cell["rows"]],
        "choices": list(run.choices),
        "cells": [_cell(cell, cfg.seed) for cell in run.cells],
    }
    return {**results, "recommendation": recommend(results)}


def _facts(run: Measured, group: Group) -> dict[str, Any]:
    facts = run.facts[group.arm]
    size = feature_bytes(run.records[group.code], len(facts.taps)) if facts.taps else 0.0
    return {
        "family": facts.family,
        "num_parameters": facts.num_parameters,
        "taps": list(facts.taps),
        "feature_bytes_per_token": size,
    }


def _quality(cfg: EvalConfig, groups: Mapping[Group, Any]) -> list[dict[str, Any]]:
    return [
        quality_row(group, found, cfg.seed)
        for group, entries in groups.items()
        for temperature in cfg.temperatures
        for shape in cfg.families.shapes
        if (found := measured(entries, temperature, shape))
    ]


def _codes(cfg: EvalConfig, groups: Mapping[Group, Any], run: Measured) -> list[dict[str, Any]]:
    """Every code of the arm that was trained from several, with tau over that from the first."""
    first, arm = cfg.families.feature_codes[0], cfg.families.feature_arm
    coded = [group for group in groups if group.is_coded]
    if not coded or arm is None:
        return []
    plain, shape = Group(arm, "tokens", first), next(iter(cfg.families.shapes))
    same = {group: _seeded(groups[group], cfg.families.feature_seeds) for group in (plain, *coded)}
    return [
        {
            "arm": arm,
            "code": group.code,
            "temperature": temperature,
            "feature_bytes_per_token": _facts(run, group)["feature_bytes_per_token"],
            **described("tau_ratio", tau_ratio(ours, measured(same[plain], temperature, shape), cfg.seed)),
        }
        for group in same
        for temperature in cfg.temperatures
        if (ours := measured(same[group], temperature, shape))
    ]


def _seeded(entries: Sequence[dict[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    return [one for one in entries if one["seed"] in seeds]


def _prompts(cfg: EvalConfig, run: Measured) -> dict[str, Any]:
    return {
        "source": f"held-out split of {cfg.data.name}",
        "screening_source": f"validation split of {cfg.data.name}",
        "checked": cfg.lossless.prompts,
        "checked_tokens": cfg.lossless.tokens,
        "checked_dtype": cfg.lossless.dtype,
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
    base = fastest_arm([cell], (AUTOREGRESSIVE, TRANSFORMERS))
    arms = [
        {
            **one,
            "tokens_per_s": arm_speed([cell], one["arm"]),
            **described("over_baseline", arm_ratio([cell], one["arm"], str(base), seed)),
        }
        for one in cell["arms"]
    ]
    return {**{key: value for key, value in cell.items() if key != "rows"}, "baseline": base, "arms": arms}
