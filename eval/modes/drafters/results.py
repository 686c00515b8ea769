"""From finished cells to results.json: every arm's ratios, rows, what is the fastest for which text, and the words that
define them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.arms.base import PLAIN_ARMS
from eval.config import EvalConfig
from eval.modes.drafters.targets import Target
from eval.modes.drafters.which_when import mixtures, which_when
from eval.prompts.kinds import TextPrompts
from eval.results.comparisons import (
    BESIDE,
    CELL,
    SPEEDS,
    Run,
    cell_with_ratios,
    cells_of_runs,
    check_runs,
    pooled_comparison,
    prompts_entry,
)
from eval.results.document import DEFINITIONS, heading, target_entry
from eval.results.energy import energy_of
from eval.results.statistics import fastest_arm

_SHARED = (*SPEEDS, *BESIDE)
_OWN = {
    "cell": CELL,
    "texts": "code: windows of held-out sources are continued. free: how docstrings of held-out sources begin. edit, "
    "answer, log: tasks made of held-out files, with what they copy from in the prompt. own: the prompts of a file.",
    "choices": "Draft lengths, and the peers' settings, are chosen for every arm and cell on prompts of the validation "
    "split (of a file: on others than are timed), which are never reported; the fastest median counts.",
    "over_plain": "Speed over that of the faster way without a draft in the same cell, paired by batch of prompts: our "
    "autoregressive loop or transformers generate.",
    "which_when": "The arm of the highest median tokens per second. `as_good` are those that the same batches do not "
    "tell from it: the 95% interval of its speed over theirs includes 1. The best is picked on the prompts that it is "
    "reported on, so its speed is slightly flattered. Null where there are fewer than 3 batches. "
    "Without training: no part of it has weights.",
    "mixtures": "A mixture over the fastest arm that drafts with one of its members alone, paired by batch of prompts. "
    "What it learned in cells before stays with it, as it would in a service.",
    "vllm": "vLLM's CPU engine in its own environment, times taken inside it; vllm ngram is its prompt lookup, which "
    "looks for 2 to 4 tokens. It draws its own noise, so at temperature 1 its text differs from ours.",
}


def make_results(
    cfg: EvalConfig,
    targets: Sequence[Target],
    texts: Mapping[str, TextPrompts],
    cells: Sequence[dict[str, Any]],
    choices: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The content of results.json; the target of that name is the first that writes."""
    dtype = {cell["target"]: cell["dtype"] for cell in cells}
    described_targets = {one.key: target_entry(one.description, dtype[one.key]) for one in targets}
    arms = arms_in_words(cfg)
    every, runs = [cell_with_ratios(cell, compared_arms, cfg.seed) for cell in cells], [[cell] for cell in cells]
    return {
        **heading(cfg, sum(one["seconds"] for one in [*cells, *choices])),
        "target": described_targets[targets[0].key],
        "targets": [{"key": one.key, "texts": list(one.texts), **described_targets[one.key]} for one in targets],
        "drafts": dict(cfg.drafts),
        "prompts": {
            **prompts_entry(cfg, cfg.drafters),
            "file": cfg.prompts.file,
            "mean_tokens": {
                text: sum(len(one.ids) for one in prompts.reported) / len(prompts.reported)
                for text, prompts in texts.items()
            },
        },
        "arms": arms,
        "definitions": {**_OWN, **{name: DEFINITIONS[name] for name in _SHARED}},
        "rows": [row for cell in cells for row in cell["rows"]],
        "energy": energy_of(cells),
        "choices": list(choices),
        "cells": every,
        "which_when": which_when(runs, arms, cfg.seed),
        "mixtures": mixtures(runs, arms, cfg.seed),
    }


def arms_in_words(cfg: EvalConfig) -> dict[str, Any]:
    """Name -> what it is."""
    ways = cfg.drafters.ways(cfg.drafts)
    return {
        way.name: {
            **{key: value for key, value in asdict(way).items() if key not in ("name", "is_asked")},
            "lengths": list(way.lengths),
            "texts": list(way.texts),
            "members": way.members,
            "has_weights": way.has_weights,
        }
        for way in ways
    }


def compared_arms(cells: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Ratio -> the arm that others are held against in runs of one cell: the faster one without a draft."""
    plain = fastest_arm(cells, PLAIN_ARMS)
    return {} if plain is None else {"over_plain": plain}


def check_drafters(files: Sequence[Path], runs: Sequence[Run]) -> None:
    """Raise InputError naming two of `files` and both values where `runs` do not time the same arms on the same
    prompts."""
    check_runs(files, runs, ("targets", "arms"), "drafters.choices")


def pool_drafters(runs: Sequence[Run]) -> dict[str, Any]:
    """The content of results.json for `runs` that `check_drafters` let pass."""
    arms, seed, cells = runs[0]["arms"], runs[0]["environment"]["seed"], cells_of_runs(runs)
    return {
        **pooled_comparison(runs, compared_arms),
        "which_when": which_when(cells, arms, seed),
        "mixtures": mixtures(cells, arms, seed),
    }
